"""What listeners hear of a generation that has ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hearth.daemon.door.finished import FinishedRequest
from hearth_client import Client
from hearth_client.errors import ExecutorFailed
from tests.daemon.door.harness import Harness, running_door, until
from tests.daemon.door.test_request_tracker import Desk


@pytest.fixture
def heard() -> list[FinishedRequest]:
    return []


@pytest.fixture
def door(heard: list[FinishedRequest]) -> Iterator[Harness]:
    with running_door(listeners=[heard.append]) as door:
        yield door


def test_the_id_of_accepted_is_that_of_the_record(
    door: Harness, heard: list[FinishedRequest]
) -> None:
    with Client(door.path, name="tests") as client:
        welcome = client.connect()
        generation = client.generate("count", max_tokens=4)
        assert generation.request == ""
        generation.text()
        assert generation.request == f"{welcome.epoch[:8]}-1"
    until(lambda: heard)
    (ended,) = heard
    assert (ended.request, ended.client) == (generation.request, "tests")
    assert (ended.reason, ended.failed) == ("length", False)
    assert (ended.prompt_tokens, ended.completion_tokens) == (5, 4)


def test_the_stages_follow_one_another(door: Harness, heard: list[FinishedRequest]) -> None:
    with Client(door.path) as client:
        client.generate("count", max_tokens=4).text()
    until(lambda: heard)
    (ended,) = heard
    stages = (ended.tokenize_s, ended.queue_s, ended.prefill_s, ended.decode_s)
    assert all(seconds >= 0 for seconds in stages)
    assert ended.ttft_s is not None
    assert sum(stages[:3]) <= ended.ttft_s <= ended.total_s
    assert sum(stages) <= ended.total_s
    assert ended.detokenize_s == 4 * 0.25


def test_what_the_prefix_cache_gave_is_told_of_the_first_place(
    door: Harness, heard: list[FinishedRequest]
) -> None:
    with Client(door.path) as client:
        generation = client.generate("count", max_tokens=14)
        generation.text()
        assert generation.done is not None
        assert generation.done.usage.cached_tokens == 3
    until(lambda: heard)
    assert heard[0].cached_tokens == 3


def test_a_session_that_pins_is_known_for_it(door: Harness) -> None:
    with Client(door.path) as client:
        client.generate("count", max_tokens=1, cache="bypass").text()
        assert not any(one.pins for one in door.door.sessions.all())
        client.generate("count", max_tokens=1, cache="pin").text()
        client.generate("count", max_tokens=1).text()
        assert [one.pins for one in door.door.sessions.all()] == [True]


def test_speculation_and_failures_are_told(door: Harness, heard: list[FinishedRequest]) -> None:
    with Client(door.path) as client:
        client.generate("speculate").text()
        with pytest.raises(ExecutorFailed):
            client.generate("fail").text()
        client.generate("hang").cancel()
    until(lambda: len(heard) == 3)
    speculated, failed, cancelled = heard
    assert (speculated.rounds, speculated.drafted, speculated.accepted_tokens) == (3, 15, 6)
    assert (failed.reason, failed.failed, failed.completion_tokens) == ("executor_failed", True, 1)
    assert (cancelled.reason, cancelled.failed, cancelled.ttft_s) == ("cancelled", False, None)


def test_the_caller_s_trace_and_options_are_told(
    door: Harness, heard: list[FinishedRequest]
) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with Client(door.path) as client:
        client.generate("count", max_tokens=3, traceparent=parent).text()
        client.generate(messages=[{"role": "user", "content": "count"}], max_tokens=1).text()
    until(lambda: len(heard) == 2)
    raw, chat = heard
    assert (raw.traceparent, chat.traceparent) == (parent, None)
    assert (raw.chat, chat.chat) == (False, True)
    assert raw.options is not None
    assert raw.options.max_tokens == 3


def test_what_is_no_generation_is_not_told() -> None:
    heard: list[FinishedRequest] = []
    desk = Desk(listeners=[heard.append])
    desk.tracker.fail(desk.request("a", "convert"), "deadline_exceeded", "late")
    desk.tracker.fail(desk.request("b"), "deadline_exceeded", "late")
    desk.tracker.fail(desk.request("c"), "deadline_exceeded", "late")
    assert [ended.request.partition("-")[2] for ended in heard] == ["2", "3"]


def test_a_listener_that_fails_harms_nobody() -> None:
    def fail(_: FinishedRequest) -> None:
        raise ValueError

    heard: list[FinishedRequest] = []
    desk = Desk(listeners=[fail, heard.append])
    desk.tracker.done(desk.request(), "stop")
    assert len(heard) == 1
    assert desk.socket.sent[0]["t"] == "done"
    assert desk.state.totals["internal_errors"] == 1
