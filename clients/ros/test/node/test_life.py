import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from hearth_client import Client
from hearth_msgs.msg import Turn

BEGIN = "Once there"


def story(ros: Any, **fields: Any) -> Any:
    return ros.goal_type(messages=[Turn(role="user", content="Tell me a story")], **fields)


def test_sigterm_ends_goals_session_and_node(ros: Any, home: Any) -> None:
    with ros.hearth("short", address=str(home.socket)) as process, Client(home.socket) as client:
        sent = ros.send("short", story(ros, options='{"ignore_eos": true}'))
        sent.feedback.get(timeout=30)
        clients = client.status().clients
        process.terminate()
        state, result = sent.end()
        assert (state, result.reason) == ("aborted", "cancelled")
        assert result.text[:9] in {BEGIN[:n] for n in range(1, 10)}
        assert process.wait() == 0, process.log()
        assert client.status().clients == clients - 1
    assert "Traceback" not in process.log()


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", -1), ("options", "{"), ("tools_file", "/nowhere.json"), ("queue", "many")],
)
def test_a_wrong_parameter_ends_the_node_with_a_sentence(
    ros: Any, home: Any, name: str, value: Any
) -> None:
    with ros.starting("wrong", address=str(home.socket), **{name: value}) as process:
        assert process.wait() == 1
    assert re.search(rf"\b{name}\b|{value}", process.log())
    assert "Traceback" not in process.log()


def test_a_daemon_may_come_and_go(ros: Any, start_daemon: Callable[..., Any]) -> None:
    first = start_daemon("home", "going")
    first.stop()
    parameters = {"address": str(first.socket), "connect_timeout_s": 0.5}
    with ros.hearth("patient", **parameters):
        assert ros.call("patient", "health").success is False
        state, result = ros.send("patient", story(ros)).end()
        assert (state, result.error_code) == ("aborted", "connection_timeout")
        second = start_daemon("home", "going")
        assert ros.call("patient", "health").success is True
        epoch = ros.call("patient", "metadata").epoch
        assert ros.send("patient", story(ros)).end()[0] == "succeeded"
        second.stop()
        start_daemon("home", "going")
        assert ros.send("patient", story(ros)).end()[0] == "succeeded"
        assert ros.call("patient", "metadata").epoch != epoch


@pytest.mark.skipif(os.environ["ROS_VERSION"] == "1", reason="ROS 1 has no lifecycle")
def test_the_lifecycle(ros: Any, home: Any) -> None:
    parameters = {"address": str(home.socket), "autostart": False}
    with ros.starting("managed", **parameters) as process:
        assert ros.change_state("managed", "configure"), process.log()
        assert ros.call("managed", "health").success
        assert ros.send("managed", story(ros)) is None
        assert ros.change_state("managed", "activate")
        running = ros.send("managed", story(ros, options='{"ignore_eos": true}'))
        running.feedback.get(timeout=30)
        assert ros.change_state("managed", "deactivate")
        state, result = running.end()
        assert (state, result.reason) == ("aborted", "cancelled")
        assert ros.send("managed", story(ros)) is None
        assert ros.change_state("managed", "cleanup")
        assert ros.change_state("managed", "configure")
        assert ros.change_state("managed", "activate")
        assert ros.send("managed", story(ros)).end()[0] == "succeeded"
        process.terminate()
        assert process.wait() == 0
    assert "Traceback" not in process.log()
