"""Generations as the door tells of them: those that have ended, and those that are open."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hearth.actors.supervisor_messages import ExecutorMetrics
from hearth.daemon.door.finished import FinishedRequest
from hearth.daemon.door.overview import (
    OpenClient,
    RunningRequest,
    generations,
    open_clients,
    running_request,
    tokens_of_replies,
)
from hearth.daemon.door.replies import executor_report
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.step_times import StageMetrics
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics
from hearth.runtime.request import RowRound
from hearth.runtime.runner.image_merge import MultimodalMetrics
from hearth.runtime.speculation.policy import EagleGenerationMetrics
from hearth_client import CancelledByOperator, Client
from hearth_client.errors import ExecutorFailed
from hearth_client.protocol import ImagesReport
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


@pytest.fixture
def door_with_requests() -> Iterator[Harness]:
    with running_door() as door:
        yield door


def requests(door_with_requests: Harness) -> list[RunningRequest]:
    state, sessions = door_with_requests.door.state, door_with_requests.door.sessions
    now = time.monotonic()
    return door_with_requests.on_loop(
        lambda: [running_request(one, state, now) for one in generations(sessions)]
    )


def clients(door_with_requests: Harness) -> list[OpenClient]:
    return door_with_requests.on_loop(lambda: open_clients(door_with_requests.door.sessions))


def tokens(door_with_requests: Harness) -> int:
    return door_with_requests.on_loop(
        lambda: tokens_of_replies(door_with_requests.door.sessions, door_with_requests.door.state)
    )


def test_open_requests_are_told_with_what_they_wait_for(door_with_requests: Harness) -> None:
    with (
        Client(door_with_requests.path, name="kiosk") as client,
        Client(door_with_requests.path, status_only=True) as watcher,
    ):
        watcher.connect()
        _open = client.generate("silent"), client.generate("hang")
        long = client.generate("count", max_tokens=100_000)
        next(long)
        until(
            lambda: (
                [one.state for one in requests(door_with_requests)][1:] == ["waiting", "replying"]
            )
        )
        encoding, waiting, replying = requests(door_with_requests)
        assert (encoding.state, encoding.prompt_tokens) == ("encoding", 0)
        assert (waiting.prompt_tokens, waiting.tokens) == (4, 0)
        assert replying.request == long.request
        assert replying.client == "kiosk"
        assert replying.tokens > 0
        assert encoding.age_s >= waiting.age_s >= replying.age_s > 0
        (told,) = clients(door_with_requests)
        assert (told.name, told.open) == ("kiosk", 3)
        assert told.tokens > 0


def test_tokens_of_replies_that_ended_are_counted_on(door_with_requests: Harness) -> None:
    with Client(door_with_requests.path) as client:
        for _ in range(3):
            client.generate("count", max_tokens=5).text()
        (told,) = clients(door_with_requests)
        assert (told.open, told.tokens) == (0, 15)
    until(lambda: clients(door_with_requests) == [])
    assert tokens(door_with_requests) == 15


def test_a_request_that_the_operator_ends_fails_for_its_client(door_with_requests: Harness) -> None:
    with Client(door_with_requests.path) as client:
        generation, other = client.generate("hang"), client.generate("count", max_tokens=3)
        assert other.text() == "0 1 2 "
        door_with_requests.on_loop(lambda: door_with_requests.door.cancel(generation.request))
        with pytest.raises(CancelledByOperator, match="operator"):
            generation.text()
    until(
        lambda: (
            len(door_with_requests.actors.cancelled)
            == len(door_with_requests.actors.control_cancelled)
            == 1
        )
    )
    assert door_with_requests.totals()["cancelled_by_operator"] == 1


@pytest.mark.parametrize("name", ["", "1", "b09922ff-1", "ended", "9" * 5000])
def test_only_what_is_open_here_can_be_ended(door_with_requests: Harness, name: str) -> None:
    with Client(door_with_requests.path) as client:
        client.generate("hang")
        ended = client.generate("count", max_tokens=1)
        ended.text()
        with pytest.raises(HearthError) as caught:
            door_with_requests.on_loop(
                lambda: door_with_requests.door.cancel(ended.request if name == "ended" else name)
            )
    assert caught.value.code == "unknown_request"


def test_every_metric_is_reported_under_its_name() -> None:
    speculation = EagleGenerationMetrics()
    speculation.record([RowRound(0, 8, 3)], draft_s=0.25, verify_s=0.5, commit_s=0.125)
    report = executor_report(
        ExecutorMetrics(StageMetrics(1, 40, 0.5), StageMetrics(9, 30, 1.5), speculation)
    )
    assert (report.prefill.steps, report.prefill.tokens, report.prefill.seconds) == (1, 40, 0.5)
    assert (report.generation.steps, report.generation.tokens) == (9, 30)
    told = report.speculation
    assert told is not None
    for name in EagleGenerationMetrics.__struct_fields__:
        assert getattr(told, name) == getattr(speculation, name)
    assert told.accept_length == 3.0


def test_an_executor_that_did_not_speculate_says_nothing_of_it() -> None:
    metrics = ExecutorMetrics(StageMetrics(), StageMetrics(), EagleGenerationMetrics())
    assert executor_report(metrics).speculation is None


def test_images_are_told_where_there_were_some() -> None:
    metrics = ExecutorMetrics(StageMetrics(), StageMetrics(), EagleGenerationMetrics())
    assert executor_report(metrics).images is None
    metrics.images = MultimodalMetrics(2, 98, 0.25, 1, 0.5)
    assert executor_report(metrics).images == ImagesReport(
        images=2, tokens=98, merge_seconds=0.25, encoded=1, encode_seconds=0.5
    )


def test_a_prefix_cache_is_told_where_there_is_one() -> None:
    metrics = ExecutorMetrics(StageMetrics(), StageMetrics(), EagleGenerationMetrics())
    assert executor_report(metrics).prefix is None
    metrics.prefix = PrefixMetrics(rows=2, hits=1, queried=90, reused=64, bytes={"device": 5})
    told = executor_report(metrics).prefix
    assert told is not None
    assert (told.rows, told.hits, told.queried, told.reused) == (2, 1, 90, 64)
    assert told.bytes == {"device": 5}
