"""Refusals that the real daemon gives: code, kind and field."""

from typing import Any

import pytest

from clients.conformance.conftest import Drive
from clients.conformance.driving import Driver
from hearth.daemon.own_daemon import OwnDaemon
from hearth_client.protocol import Generate

TURNS = [{"role": "user", "content": "Turn on the lamp"}]
TOOL = {"name": "t"}
GREATER = {"max_tokens": 1048577, "temperature": 100.5, "top_k": 1048577, "top_p": 1.5}
GREATER |= {"min_p": 1.5, "repetition_penalty": 101.0, "presence_penalty": 2.5}
GREATER |= {"frequency_penalty": 2.5, "logprobs": 21, "priority": 11, "deadline_s": 86401.0, "n": 9}

REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    *(({"prompt": "x", name: value}, "invalid_value", name) for name, value in GREATER.items()),
    ({"prompt": "x", "logit_bias": [[1, 101.0]]}, "invalid_value", "logit_bias"),
    ({"prompt": "x", "stop": ["ok", ""]}, "invalid_value", "stop[1]"),
    ({"prompt": "x", "stop": ["x"] * 17}, "invalid_value", "stop"),
    ({"prompt": "x", "cache_salt": "x" * 257}, "invalid_value", "cache_salt"),
    ({"prompt": "x", "traceparent": "of no form"}, "invalid_value", "traceparent"),
    ({"prompt": "x", "tools": [TOOL]}, "", "tools"),
    ({"messages": TURNS, "reasoning_budget": 1048577}, "invalid_value", "reasoning_budget"),
    ({"messages": [{"role": "user", "content": ""}]}, "", "messages[0].content"),
    (
        {"messages": [*TURNS, {"role": "tool", "tool_call_id": "c", "content": "x"}]},
        "invalid_value",
        "messages[1].tool_call_id",
    ),
    ({"messages": TURNS, "tools": [TOOL, TOOL]}, "invalid_value", "tools[1].name"),
    ({"messages": TURNS, "tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"messages": TURNS, "template": {"no_such": True}}, "unsupported_option", "template"),
    ({"prompt": ""}, "prompt_empty", "prompt"),
    ({"prompt": "word " * 5000}, "prompt_too_long", "prompt"),
    ({"prompt": "x", "max_tokens": 100000}, "capacity_exceeded", "max_tokens"),
    ({"prompt": "x", "adapter": "nobody"}, "adapter_unknown", "adapter"),
    (
        {"messages": TURNS, "response_format": {"type": "regex", "regex": "(a"}},
        "grammar_invalid",
        "response_format",
    ),
    (
        {"messages": TURNS, "response_format": {"type": "lark", "grammar": "nonsense"}},
        "grammar_invalid",
        "response_format",
    ),
]


def test_refusals_of_a_generation(drive: Drive, daemon: OwnDaemon) -> None:
    driver = drive(daemon.socket)
    driver.connect()
    told = []
    for number, (request, _, _) in enumerate(REFUSALS):
        driver.generate(str(number), **request)
    for number, (request, code, field) in enumerate(REFUSALS):
        end = driver.answered(str(number)).end
        assert end["event"] == "failed", request
        assert end["kind"] == "request", end
        assert end["message"]
        same = (not code or end["code"] == code) and end.get("field", "").startswith(field)
        if not same:
            told.append((request, end))
    assert told == []
    # All of it has left the session as it was.
    assert driver.ask("after", messages=TURNS, max_tokens=4).end["event"] == "done"
    assert set(GREATER) <= set(Generate.__struct_fields__)


def test_refusals_of_other_requests(drive: Drive, daemon: OwnDaemon) -> None:
    driver = drive(daemon.socket)
    driver.connect()
    driver.do("detokenize", "d", request={"tokens": [1 << 30]})
    end = driver.expect("failed", "d")
    assert (end["code"], end["kind"]) == ("invalid_value", "request")
    driver.do("tokenize", "t", request={"messages": []})
    assert driver.expect("failed", "t")["code"] == "invalid_value"


def test_a_lease_out_of_range_fails_to_connect(drive: Drive, daemon: OwnDaemon) -> None:
    driver = drive(daemon.socket)
    driver.do("connect", lease_s=4000.0)
    end = driver.expect("failed")
    assert (end["code"], end["kind"], end["field"]) == ("invalid_value", "request", "lease_s")
    driver.connect(lease_s=3600)


@pytest.fixture
def waiting(drive: Drive, slow: OwnDaemon) -> Driver:
    """A driver that is connected to the daemon with slow steps."""
    started = drive(slow.socket)
    started.connect()
    return started


def test_a_deadline_ends_a_reply_with_what_has_come(waiting: Driver) -> None:
    request = {"max_tokens": 1900, "ignore_eos": True, "deadline_s": 0.5}
    answered = waiting.ask("a", prompt="a", **request)
    assert (answered.end["code"], answered.end["kind"]) == ("deadline_exceeded", "service")
    assert answered.tokens()
    assert answered.end["usage"]["completion_tokens"] >= len(answered.tokens())


def test_too_many_requests(waiting: Driver) -> None:
    for name in "abcd":
        waiting.generate(name, prompt="a", max_tokens=1000, ignore_eos=True)
    waiting.generate("e", prompt="a", max_tokens=1)
    end = waiting.answered("e").end
    assert (end["code"], end["kind"]) == ("too_many_requests", "service")
    for name in "abcd":
        waiting.do("cancel", name)
    for name in "abcd":
        assert waiting.answered(name).end["reason"] == "cancelled"
