"""What a client asks of the real daemon and what it gets."""

import pytest

from clients.conformance.conftest import Drive
from clients.conformance.driving import Client, Driver
from hearth.daemon.own_daemon import OwnDaemon
from hearth_client import Client as Reference

TURNS = [{"role": "user", "content": "Turn on the lamp"}]
LAMP = {
    "name": "set_lamp",
    "description": "Switch the lamp on or off.",
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def driver(drive: Drive, daemon: OwnDaemon) -> Driver:
    """A driver that is connected to the daemon."""
    started = drive(daemon.socket)
    started.connect()
    return started


def test_the_check_passes(client: Client) -> None:
    assert (client.folder / "README.md").is_file()


def test_the_welcome_is_told(drive: Drive, daemon: OwnDaemon) -> None:
    driver = drive(daemon.socket)
    told = driver.connect(lease_s=40, name="conformance")
    with Reference(daemon.socket) as reference:
        welcome = reference.connect()
    assert told["proto"] == 1
    assert told["server"] == welcome.server
    assert told["epoch"] == welcome.epoch
    assert told["model"] == "home"
    assert set(told["features"]) == set(welcome.features)
    assert told["limits"]["lease_s"] == 40
    assert told["limits"]["frame_bytes"] == welcome.limits.frame_bytes
    assert told["limits"]["total_tokens"] == welcome.limits.total_tokens
    assert driver.close() == [{"event": "closed"}]


def test_the_end_of_input_closes_the_client(driver: Driver) -> None:
    assert driver.end_input() == [{"event": "closed"}]


def test_the_example_prints_the_reply(client: Client, daemon: OwnDaemon) -> None:
    with Reference(daemon.socket) as reference:
        text = reference.generate(messages=TURNS, max_tokens=64).text()
    ran = client.run("example", HEARTH_SOCKET=str(daemon.socket))
    assert (ran.returncode, ran.stdout) == (0, text + "\n"), ran.stderr


def test_deltas_joined_are_the_reply(driver: Driver, daemon: OwnDaemon) -> None:
    answered = driver.ask("a", messages=TURNS, max_tokens=64)
    with Reference(daemon.socket) as reference:
        generation = reference.generate(messages=TURNS, max_tokens=64)
        text = generation.text()
        assert generation.done is not None
    assert answered.events[0]["event"] == "accepted"
    usage = answered.end["usage"]
    assert answered.events[0]["prompt_tokens"] == usage["prompt_tokens"]
    assert answered.end["reason"] == "stop"
    assert answered.joined() == text
    assert answered.tokens() == generation.tokens
    assert usage["completion_tokens"] == len(answered.tokens())
    assert usage["prompt_tokens"] == generation.done.usage.prompt_tokens
