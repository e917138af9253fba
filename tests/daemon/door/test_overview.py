"""What the daemon's owner sees of open requests, and how one is ended for its client."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hearth.daemon.door.overview import (
    OpenClient,
    RunningRequest,
    generations,
    open_clients,
    running_request,
    tokens_of_replies,
)
from hearth.runtime.errors import HearthError
from hearth_client import CancelledByOperator, Client
from tests.daemon.door.harness import Harness, running_door, until


@pytest.fixture
def door() -> Iterator[Harness]:
    with running_door() as door:
        yield door


def requests(door: Harness) -> list[RunningRequest]:
    state, sessions = door.door.state, door.door.sessions
    now = time.monotonic()
    return door.on_loop(lambda: [running_request(one, state, now) for one in generations(sessions)])


def clients(door: Harness) -> list[OpenClient]:
    return door.on_loop(lambda: open_clients(door.door.sessions))


def tokens(door: Harness) -> int:
    return door.on_loop(lambda: tokens_of_replies(door.door.sessions, door.door.state))


def test_open_requests_are_told_with_what_they_wait_for(door: Harness) -> None:
    with Client(door.path, name="kiosk") as client, Client(door.path, status_only=True) as watcher:
        watcher.connect()
        _open = client.generate("silent"), client.generate("hang")
        long = client.generate("count", max_tokens=100_000)
        next(long)
        until(lambda: [one.state for one in requests(door)][1:] == ["waiting", "replying"])
        encoding, waiting, replying = requests(door)
        assert (encoding.state, encoding.prompt_tokens) == ("encoding", 0)
        assert (waiting.prompt_tokens, waiting.tokens) == (4, 0)
        assert replying.request == long.request
        assert replying.client == "kiosk"
        assert replying.tokens > 0
        assert encoding.age_s >= waiting.age_s >= replying.age_s > 0
        (told,) = clients(door)
        assert (told.name, told.open) == ("kiosk", 3)
        assert told.tokens > 0


def test_tokens_of_replies_that_ended_are_counted_on(door: Harness) -> None:
    with Client(door.path) as client:
        for _ in range(3):
            client.generate("count", max_tokens=5).text()
        (told,) = clients(door)
        assert (told.open, told.tokens) == (0, 15)
    until(lambda: clients(door) == [])
    assert tokens(door) == 15


def test_a_request_that_the_operator_ends_fails_for_its_client(door: Harness) -> None:
    with Client(door.path) as client:
        generation, other = client.generate("hang"), client.generate("count", max_tokens=3)
        assert other.text() == "0 1 2 "
        door.on_loop(lambda: door.door.cancel(generation.request))
        with pytest.raises(CancelledByOperator, match="operator"):
            generation.text()
    until(lambda: len(door.actors.cancelled) == len(door.actors.control_cancelled) == 1)
    assert door.totals()["cancelled_by_operator"] == 1


@pytest.mark.parametrize("name", ["", "1", "b09922ff-1", "ended", "9" * 5000])
def test_only_what_is_open_here_can_be_ended(door: Harness, name: str) -> None:
    with Client(door.path) as client:
        client.generate("hang")
        ended = client.generate("count", max_tokens=1)
        ended.text()
        with pytest.raises(HearthError) as caught:
            door.on_loop(lambda: door.door.cancel(ended.request if name == "ended" else name))
    assert caught.value.code == "unknown_request"
