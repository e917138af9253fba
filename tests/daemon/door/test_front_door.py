from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
import zmq
from msgspec import structs

from hearth.actors import messages as m
from hearth.actors.settings import PolicySettings
from hearth.actors.supervisor_messages import ExecutorMetrics
from hearth.daemon.door import front_door, replies
from hearth.daemon.door.front_door import FrontDoor, Waker
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import DoorSocket, Received
from hearth.daemon.door.state import DoorFacts
from hearth.daemon.service_state import ServiceState
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.step_times import StageMetrics
from hearth.runtime.speculation.policy import EagleGenerationMetrics
from hearth_client import (
    Client,
    ExecutorFailed,
    HearthClientError,
    LeaseExpired,
    MessageTooLarge,
    SlowClient,
    Speculation,
)
from tests.daemon.door.harness import (
    BACKENDS,
    FACTS,
    Harness,
    greet,
    hear,
    raw_client,
    running_door,
    say,
    until,
)
from tests.fuzz.mail import FakeSocket, Inbox, Outbox


@pytest.fixture(params=BACKENDS, ids=["asyncio", "uvloop"])
def door(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with running_door(request.param) as harness:
        yield harness


def stream(socket: zmq.Socket[bytes], request_id: str) -> list[dict[str, Any]]:
    """The answers of one request up to its end."""
    answers: list[dict[str, Any]] = []
    while not answers or answers[-1]["t"] not in ("done", "error"):
        answer = hear(socket)
        if answer.get("id") == request_id:
            answers.append(answer)
    return answers


def test_a_whole_conversation(door: Harness) -> None:
    with raw_client(door.path) as client:
        welcome = greet(client, client="test", lease_s=20.0)
        assert (welcome["proto"], welcome["model"]) == (1, "toy")
        assert welcome["limits"]["lease_s"] == 20.0
        assert welcome["limits"]["prompt_tokens"] == 50
        say(client, {"t": "generate", "id": "a", "prompt": "count", "max_tokens": 4})
        answers = stream(client, "a")
    assert [answer["t"] for answer in answers] == ["accepted", *["delta"] * 4, "done"]
    assert [answer["seq"] for answer in answers[1:-1]] == [0, 1, 2, 3]
    assert "".join(answer["text"] for answer in answers[1:-1]) == "0 1 2 3 "
    assert not any("ended" in answer for answer in answers)
    usage = answers[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 4)
    assert usage["queue_ms"] > 0
    assert usage["prefill_ms"] > 0
    assert usage["decode_ms"] > 0


def test_accepted_comes_before_tokens_that_overtook_it(door: Harness) -> None:
    with raw_client(door.path) as client:
        greet(client)
        say(client, {"t": "generate", "id": "a", "prompt": "early", "max_tokens": 3})
        answers = stream(client, "a")
    assert [a["t"] for a in answers] == ["accepted", "delta", "delta", "delta", "done"]
    assert [a["tokens"] for a in answers[1:-1]] == [[0], [1], [2]]


def test_logprobs_and_timestamps(door: Harness) -> None:
    sent = time.monotonic()
    with Client(door.path) as client:
        (delta,) = client.generate("logprobs", logprobs=2, timestamps=True)
    assert delta.logprobs[0].logprob == -0.5
    assert delta.logprobs[0].top == [(65, -0.5), (66, -1.5)]
    assert delta.ended is not None
    assert sent <= delta.ended <= time.monotonic()


def test_done_tells_of_the_rounds_of_speculation(door: Harness) -> None:
    with Client(door.path) as client:
        generation = client.generate("speculate", speculation=True)
        assert generation.text() == "x" * 6
        done, plain = generation.done, client.generate("count", max_tokens=1)
        plain.text()
    assert door.actors.prepared[0].options.speculation is True
    assert done is not None
    assert done.usage.completion_tokens == 6
    assert done.speculation == Speculation(rounds=3, drafted=15, accepted=6, accept_length=2.0)
    assert plain.done is not None
    assert plain.done.speculation is None


def test_two_clients_may_use_the_same_ids(door: Harness) -> None:
    with raw_client(door.path) as first, raw_client(door.path) as second:
        for client, count in ((first, 3), (second, 5)):
            greet(client)
            say(client, {"t": "generate", "id": "x", "prompt": "count", "max_tokens": count})
        assert stream(first, "x")[-1]["usage"]["completion_tokens"] == 3
        assert stream(second, "x")[-1]["usage"]["completion_tokens"] == 5


def test_cancel_ends_at_once_and_nobody_cancels_for_others(door: Harness) -> None:
    with raw_client(door.path) as first, raw_client(door.path) as second:
        for client in (first, second):
            greet(client)
        say(first, {"t": "generate", "id": "x", "prompt": "hang"})
        assert hear(first)["t"] == "accepted"
        say(second, {"t": "cancel", "id": "x"})
        say(second, {"t": "lease"})
        assert hear(second)["t"] == "leased"
        assert door.on_loop(lambda: door.door.open_requests) == 1
        for _ in range(3):
            say(first, {"t": "cancel", "id": "x"})
        done = hear(first)
        assert (done["t"], done["id"], done["reason"]) == ("done", "x", "cancelled")
        say(first, {"t": "lease"})
        assert hear(first)["t"] == "leased"
    (rid,) = [prepare.rid for prepare in door.actors.prepared]
    until(lambda: door.actors.cancelled == [rid] and door.actors.control_cancelled == [rid])


def test_a_client_that_leaves_gives_its_place_free_at_once() -> None:
    with running_door(clients=1) as door:
        for _ in range(3):
            with Client(door.path) as client:
                client.generate("hang")
            until(lambda: door.sessions() == 0)
        until(lambda: len(door.actors.cancelled) == 3)


def test_a_killed_client_loses_its_requests(door: Harness) -> None:
    program = (
        "import sys; from hearth_client import Client\n"
        "c = Client(sys.argv[1])\n"
        "for d in c.generate('count', max_tokens=100000): print(d.seq, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(door.path)], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
    until(lambda: len(door.actors.cancelled) == 1)
    assert door.sessions() == 0


def test_a_slow_client_gets_larger_deltas_and_nothing_is_lost() -> None:
    with running_door(send_mark=4, slow_bytes=1 << 24) as door, Client(door.path) as client:
        client._session._channel._socket.setsockopt(zmq.RCVHWM, 4)  # type: ignore[union-attr]  # connected
        generation = client.generate("flood", max_tokens=3000)
        until(lambda: len(door.on_loop(lambda: door.door._tracker.delivery.behind)) == 1, 20)
        deltas = list(generation)
        assert generation.tokens == list(range(3000))
        assert len(deltas) < 3000
        assert max(len(delta.tokens) for delta in deltas) > 1
        assert [delta.seq for delta in deltas] == list(range(len(deltas)))
        assert door.on_loop(lambda: door.door._tracker.delivery.behind) == []


@pytest.mark.parametrize("bound", [{"slow_bytes": 50_000}, {"slow_s": 0.1}])
def test_a_client_that_does_not_read_is_failed(bound: dict[str, Any]) -> None:
    with running_door(send_mark=4, **bound) as door, Client(door.path) as client:
        client.connect()
        generation = client.generate("flood", max_tokens=100_000)
        until(lambda: len(door.actors.cancelled) == 1, 30)
        with Client(door.path) as other:
            assert other.generate("count", max_tokens=3).text() == "0 1 2 "
        with pytest.raises(SlowClient):
            generation.text()


def test_a_silent_client_loses_its_lease() -> None:
    with running_door(lease_s=0.3) as door, raw_client(door.path) as client:
        greet(client)
        say(client, {"t": "generate", "id": "x", "prompt": "hang"})
        assert hear(client)["t"] == "accepted"
        error = hear(client)
        assert (error["t"], error["id"], error["code"]) == ("error", "x", "lease_expired")
        error = hear(client)
        assert error.get("id", "") == ""
        assert error["code"] == "lease_expired"
        assert door.sessions() == 0
        until(lambda: len(door.actors.control_cancelled) == 1)
        say(client, {"t": "status", "id": "s"})
        error = hear(client)
        assert (error["id"], error["code"]) == ("s", "hello_required")


def test_what_cannot_be_read_renews_no_lease() -> None:
    with running_door(lease_s=0.5) as door, raw_client(door.path) as client:
        greet(client)
        code = ""
        while code != "lease_expired":
            say(client, b"garbage")
            code = hear(client)["code"]


def test_a_second_hello_keeps_the_lease_that_was_asked_for(door: Harness) -> None:
    with raw_client(door.path) as client:
        assert greet(client, lease_s=300.0)["limits"]["lease_s"] == 300.0
        assert greet(client)["limits"]["lease_s"] == 300.0
        assert greet(client, lease_s=5.0)["limits"]["lease_s"] == 5.0


def test_a_text_beyond_the_largest_answer_is_refused(
    door: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "_MAX_TEXT_BYTES", 3)
    with Client(door.path) as client:
        assert client.detokenize([97] * 3) == "aaa"
        with pytest.raises(MessageTooLarge) as caught:
            client.detokenize([97] * 4)
        assert caught.value.field == "tokens"


def test_a_waiting_client_keeps_its_lease() -> None:
    with running_door(lease_s=1.2, step_s=0.5) as door, Client(door.path) as client:
        assert client.generate("count", max_tokens=4).text() == "0 1 2 3 "


def test_a_pausing_client_is_told() -> None:
    with running_door(lease_s=0.6) as door, Client(door.path) as client:
        generation = client.generate("hang")
        until(lambda: "lease_expired" in door.totals())
        with pytest.raises(LeaseExpired):
            generation.text()
        assert client.tokenize("a") == [97]


def test_a_deadline_ends_a_request() -> None:
    with running_door() as door, Client(door.path) as client:
        with pytest.raises(HearthClientError, match="deadline_exceeded"):
            client.generate("hang", deadline_s=0.05).text()
        until(lambda: len(door.actors.cancelled) == 1)
        deadline = door.actors.prepared[0].deadline
        assert deadline is not None
        assert deadline <= time.monotonic()


def test_an_actor_that_does_not_answer_is_not_waited_for() -> None:
    with running_door(answer_s=0.05) as door, Client(door.path) as client:
        with pytest.raises(HearthClientError, match="deadline_exceeded"):
            client.tokenize("silent")
        assert client.detokenize([72, 105]) == "Hi"


def test_a_repeated_hello_tells_the_limits_of_the_executor_that_works(door: Harness) -> None:
    # Before the first one they are those of the engine folder, of which less may fit into memory.
    with raw_client(door.path) as client:
        assert greet(client)["limits"]["total_tokens"] == 100
        fitting = structs.replace(FACTS, prompt_tokens=31, total_tokens=32)
        door.on_loop(lambda: door.door.tell(facts=fitting))
        limits = greet(client)["limits"]
    assert (limits["prompt_tokens"], limits["total_tokens"]) == (31, 32)


def test_a_failed_request_keeps_what_was_sent(door: Harness) -> None:
    with Client(door.path) as client:
        generation = client.generate("fail")
        assert next(generation).text == "0 "
        with pytest.raises(ExecutorFailed) as caught:
            next(generation)
        assert caught.value.field == "device"


def test_a_req_client_gets_its_delimiter_back(door: Harness) -> None:
    with raw_client(door.path, zmq.REQ) as client:
        assert greet(client)["t"] == "welcome"
        say(client, {"t": "tokenize", "id": "t", "text": "Hi"})
        assert hear(client)["tokens"] == [72, 105]
        say(client, {"t": "detokenize", "id": "t", "tokens": [-1]})
        assert hear(client)["field"] == "tokens[0]"
        say(client, {"t": "status", "id": "s"})
        assert hear(client)["engine"] == {"layers": 2}


def test_status_counts(door: Harness) -> None:
    with Client(door.path) as client:
        client.generate("count", max_tokens=2).text()
        # The scheduler, as it is played here, has a batch of one row and two requests that wait.
        held = [client.generate("hang") for _ in range(3)]
        while any(one.accepted is None for one in held):
            client.status()
        report = client.status()
        held[0].cancel()
        assert held[0].text() == ""
        later = client.status()
    assert (report.state, report.clients, report.running, report.queued) == ("ready", 1, 1, 2)
    assert (later.running, later.queued) == (0, 2)
    assert report.executor is None
    assert report.queued_tokens == 30
    assert (report.totals["requests"], report.totals["completed"]) == (4, 1)
    assert report.places == 8


def test_status_tells_what_the_executor_has_measured(door: Harness) -> None:
    metrics = ExecutorMetrics(StageMetrics(1, 9, 0.5), StageMetrics(), EagleGenerationMetrics())
    door.on_loop(lambda: door.door.tell(metrics=metrics))
    with Client(door.path) as client:
        executor = client.status().executor
    assert executor is not None
    assert (executor.prefill.tokens, executor.prefill.seconds) == (9, 0.5)
    assert executor.speculation is None


def test_status_tells_nothing_of_an_executor_that_is_lost(door: Harness) -> None:
    metrics = ExecutorMetrics(StageMetrics(1, 9, 0.5), StageMetrics(), EagleGenerationMetrics())
    door.on_loop(lambda: door.door.tell(service_state=ServiceState("ready"), metrics=metrics))
    with Client(door.path) as client:
        assert client.status().executor is not None
        door.on_loop(lambda: door.door.tell(service_state=ServiceState("starting")))
        assert client.status().executor is None


def test_a_stop_ends_what_is_open_and_removes_the_socket() -> None:
    with running_door() as door, raw_client(door.path) as client:
        greet(client)
        say(client, {"t": "generate", "id": "x", "prompt": "hang"})
        assert hear(client)["t"] == "accepted"
        stopping = door.portal.start_task_soon(door.door.stop, 0.3)
        until(lambda: door.on_loop(lambda: door.door._state.service_state.state) == "draining")
        say(client, {"t": "generate", "id": "y", "prompt": "count"})
        error = hear(client)
        assert (error["id"], error["code"]) == ("y", "shutting_down")
        error = hear(client)
        assert (error["id"], error["code"]) == ("x", "shutting_down")
        stopping.result(5)
        until(lambda: not door.path.exists())


def test_a_drain_lets_open_requests_finish() -> None:
    with running_door(step_s=0.02) as door, Client(door.path) as client:
        generation = client.generate("count", max_tokens=10)
        next(generation)
        stopping = door.portal.start_task_soon(door.door.stop, 5.0)
        assert generation.text().endswith("9 ")
        stopping.result(1)


def test_a_second_door_is_refused_and_does_no_harm(door: Harness) -> None:
    with (
        pytest.raises(HearthError, match=f"process {os.getpid()} already serves") as caught,
        running_door(path=door.path),
    ):
        pass
    assert caught.value.code == "already_running"
    with Client(door.path) as client:
        assert client.tokenize("a") == [97]


@pytest.fixture(params=BACKENDS, ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", request.param


async def test_a_descriptor_rings_until_it_has_been_read() -> None:
    reading, writing = os.pipe()
    waker = Waker()
    waker.watch(reading)
    os.write(writing, b"x")
    await waker.wait(60)
    await waker.wait(60)
    os.read(reading, 1)
    waker.unwatch(reading)
    os.close(reading)
    os.close(writing)


async def test_a_ring_by_hand_is_kept_for_the_next_wait() -> None:
    waker = Waker()
    waker.wake()
    await waker.wait(60)
    with anyio.move_on_after(0.05) as waited:
        await waker.wait(60)
    assert waited.cancelled_caught


async def test_it_rings_when_the_time_is_up() -> None:
    await Waker().wait(0.01)


DEAR, CHEAP = 2, 4
COSTS = {DEAR: 0.0139, CHEAP: 0.0001}


class Loop:
    """A door whose clock moves by what messages cost, as their connection says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.handled: list[int] = []
        self.socket = FakeSocket(0)
        self.door = FrontDoor(
            DoorSettings(socket=str(folder / "d.sock")),
            PolicySettings(),
            inbox=Inbox(m.DoorMessage),
            to_tokenizer=Outbox(m.TokenizerMessage),
            to_scheduler=Outbox(m.SchedulerMessage),
            to_scheduler_control=Outbox(m.SchedulerControl),
            facts=DoorFacts(server="hearth test"),
            environ={},
        )
        self.door._socket.close()
        self.door._socket._all = [cast("DoorSocket", self.socket)]
        clock = SimpleNamespace(thread_time=lambda: self.now, monotonic=lambda: self.now)
        monkeypatch.setattr(front_door, "time", clock)
        monkeypatch.setattr(self.door._requests, "handle", self._handle)

    def send(self, connection: int, count: int = 1) -> None:
        for _ in range(count):
            self.socket.put(connection, [b"x"])

    def turns(self, count: int) -> list[int]:
        """What each of so many turns handles."""
        counts = []
        for _ in range(count):
            before = len(self.handled)
            self.door._take_requests()
            counts.append(len(self.handled) - before)
        return counts

    def _handle(self, received: Received) -> None:
        self.handled.append(received.connection)
        self.now += COSTS[received.connection]


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    made = Loop(tmp_path, monkeypatch)
    with closing(made.door):
        yield made


def test_a_turn_takes_as_many_messages_as_fit_into_its_time(loop: Loop) -> None:
    loop.send(CHEAP, 50)
    assert loop.turns(4) == pytest.approx([20, 20, 10, 0], abs=1)
    assert len(loop.handled) == 50


def test_what_a_message_took_too_long_is_owed_to_the_turns_behind_it(loop: Loop) -> None:
    loop.send(DEAR, 2)
    assert loop.turns(7) == [1, *[0] * 5, 1]


def test_what_a_message_took_is_charged_to_its_connection(loop: Loop) -> None:
    loop.send(DEAR)
    loop.send(CHEAP)
    loop.turns(8)
    assert list(loop.socket.charged) == [(DEAR, COSTS[DEAR]), (CHEAP, pytest.approx(COSTS[CHEAP]))]


def test_the_loop_sleeps_where_nothing_can_be_due(loop: Loop) -> None:
    door = loop.door
    door.tell(ServiceState("ready"))
    assert door._idle_s == front_door._IDLE_S
    session = door.sessions.greet(DEAR, "test", 10.0, 0.0)
    # What a pause counts of a lease is more than that.
    assert door._idle_s == front_door._LEASES_S < door.state.clock.most_s
    request = door.sessions.admit(session, "a", "generate", 0.0, 5.0)
    assert door._idle_s == 0.0
    door.sessions.close(request)
    loop.socket.idle = False
    assert door._idle_s == 0.0
    loop.socket.idle = True
    door.tell(ServiceState("ready").draining("asked to"))
    assert door._idle_s == 0.0
