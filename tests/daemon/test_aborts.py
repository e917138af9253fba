"""Ten thousand aborts at random moments, on the whole way of a request but for sockets.

Front door, tokenizer, policy and a simulated executor are the real ones; what they say to one
another lies in boxes, and chance decides which box is opened next, when the executor steps and what
clients do. So every order happens that mailboxes allow, and the run is the same each time.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

import msgspec
import pytest

from hearth.actors.mailbox import Receiver, Sender
from hearth.actors.messages import (
    Accepted,
    Cancel,
    ExecutorLimits,
    ExecutorReady,
    Failed,
    Request,
    Schedule,
    SchedulerReport,
    StepOutput,
)
from hearth.actors.scheduler.policy import Decision, SchedulerPolicy
from hearth.actors.settings import PolicySettings
from hearth.actors.tokenizer.actor import TokenizerActor
from hearth.daemon.door import request_tracker
from hearth.daemon.door.replies import ActorMessageHandler
from hearth.daemon.door.request_tracker import RequestTracker
from hearth.daemon.door.requests import ClientMessageHandler
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import Received
from hearth.daemon.door.sockets import DoorSockets
from hearth.daemon.door.state import DoorFacts, DoorState
from hearth.daemon.service_state import ServiceState
from hearth.runtime.text.tokenizer import Tokenizer
from tests.actors.scheduler.simulated_executor import SimulatedExecutor
from tests.runtime.text.folders import byte_level, open_tokenizer

ABORTS = 10_000
CLIENTS = 6
OPEN = 4
LONGEST = 5


class Box:
    """A mailbox without a bound: what is posted lies here in order."""

    def __init__(self) -> None:
        self.mail: deque[Any] = deque()

    def post(self, message: Any) -> None:
        self.mail.append(message)

    async def send(self, message: Any, _timeout_s: float) -> None:
        self.mail.append(message)


def drive(work: Coroutine[Any, Any, None]) -> None:
    """Run what waits for nothing."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


class World:
    """Everything between clients and rows; `turn` lets one thing happen."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.chance = random.Random(14)
        self.now = 0.0
        # Answers of each client by id of its requests.
        self.answers: Counter[tuple[int, str, str]] = Counter()
        self.tokens: Counter[tuple[int, str]] = Counter()
        self.asked: dict[tuple[int, str], int] = {}
        self.offered: set[int] = set()
        self._doors(tokenizer)
        settings = PolicySettings(hold_s=0.02, fill_wait_ms=2.0, queue_requests=64)
        self.policy = SchedulerPolicy(settings)
        self.executor = SimulatedExecutor(
            incarnation=1, places=3, step_s=0.001, prefill_s=0.0, tell=self.to_tokenizer.post
        )
        self._stepping = False
        self.to_tokenizer.post(ExecutorReady(1, "w", ExecutorLimits(3, 100, 200)))

    def _doors(self, tokenizer: Tokenizer) -> None:
        boxes = [Box() for _ in range(4)]
        self.to_tokenizer, self.to_scheduler, self.to_control, self.to_door = boxes
        # What the scheduler says to the executor, and its own to the tokenizer and the door.
        self.to_executor = Box()
        self.actor = TokenizerActor(
            inbox=cast("Receiver[Any]", None),
            to_scheduler=cast("Sender[Any]", self.to_scheduler),
            to_scheduler_control=cast("Sender[Any]", self.to_control),
            to_door=cast("Sender[Any]", self.to_door),
            tokenizer=tokenizer,
            ends=(),
        )
        state = DoorState(DoorFacts(server="x", places=3), DoorSettings(), PolicySettings())
        state.service_state = ServiceState("ready")
        self.tracker = RequestTracker(
            state,
            cast("DoorSockets", self),
            to_tokenizer=cast("Sender[Any]", self.to_tokenizer),
            to_scheduler=cast("Sender[Any]", self.to_scheduler),
            to_scheduler_control=cast("Sender[Any]", self.to_control),
        )
        self.requests = ClientMessageHandler(state, self.tracker)
        self.replies = ActorMessageHandler(state, self.tracker, lambda _ended: None)
        self._opens: list[tuple[Box, Callable[[Any], None]]] = [
            (self.to_tokenizer, self._tokenizer_hears),
            (self.to_scheduler, self._scheduler_hears),
            (self.to_control, self._scheduler_hears),
            (self.to_door, self.replies.handle),
            (self.to_executor, self._executor_hears),
        ]

    def say(self, client: int, **message: Any) -> None:
        self.requests.handle(Received(client, False, msgspec.msgpack.encode(message), 1))

    def session_began(self, client: int) -> None:
        pass

    def full(self, _connection: int) -> bool:
        return False

    def send(self, client: int, data: bytes, *, delimited: bool) -> str:
        """The socket's part: what a client is answered."""
        assert not delimited
        answer = msgspec.msgpack.decode(data)
        what, name = answer["t"], answer.get("id", "")
        assert not self.answers[client, name, "end"], "an answer behind the end"
        self.answers[client, name, "end" if what in {"done", "error"} else what] += 1
        self.answers[client, name, answer.get("reason", answer.get("code", ""))] += 1
        self.tokens[client, name] += len(answer.get("tokens", ()))
        return "sent"

    def turn(self) -> bool:
        """Open a box, encode a text or let the executor step; False where nothing is left."""
        self.now += 0.0001
        full = [(box, hears) for box, hears in self._opens if box.mail]
        waits = self.actor._intake.first() is not None
        steps = bool(self.executor.rows or self.executor.mail or self.executor.state.waiting)
        choices: list[Callable[[], None]] = [
            lambda box=box, hears=hears: hears(box.mail.popleft())  # type: ignore[misc]  # bound now
            for box, hears in full
        ]
        choices += [self._encode] * waits + [self._step] * steps
        if choices:
            self.chance.choice(choices)()
            return True
        wake = self.policy.next_wake()
        if wake is not None:
            self.now = max(self.now, wake)
            self._carry_out(self.policy.tick(self.now))
        return wake is not None

    def _encode(self) -> None:
        lane = self.actor._intake
        message = lane.first()
        assert message is not None
        drive(self.actor._serve(message, lane))
        lane.remove(message.rid)
        lane.rotate(message.client)

    def _step(self) -> None:
        if self._stepping:
            self.executor.step(self.now)
            self._stepping = False
        elif self.executor.border() is not None:
            self._stepping = True

    def _tokenizer_hears(self, message: Any) -> None:
        drive(self.actor._handle(message))

    def _scheduler_hears(self, message: Any) -> None:
        policy, now = self.policy, self.now
        match message:
            case Request():
                self._carry_out(policy.submit(message, now))
            case Cancel(rid):
                policy.cancel(rid)
            case StepOutput():
                self._carry_out(policy.update(message, now))
            case ExecutorReady():
                self._carry_out(policy.executor_ready(message, now))
        self._carry_out(policy.tick(now))

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Failed():
                    self.to_tokenizer.post(decision)
                case Accepted() | SchedulerReport():
                    self.to_door.post(decision)
                case _:
                    self.to_executor.post(decision)

    def _executor_hears(self, message: Any) -> None:
        assert isinstance(message, Schedule)
        self.offered.update(message.new)
        assert self.offered.issuperset(message.cancelled), "who only waits is no concern of rows"
        self.executor.mail.append(message)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(tmp_path_factory.mktemp("engine"), byte_level())


def test_every_abort_leaves_one_end_and_nothing_behind(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_tracker, "log_finished", lambda _: None)
    world = World(tokenizer)
    chance = world.chance
    clients = list(range(CLIENTS))
    for client in clients:
        world.say(client, t="hello", proto=[1])
    open_ids: dict[int, list[str]] = {client: [] for client in clients}
    aborted: Counter[str] = Counter()
    number = 0
    while aborted.total() < ABORTS:
        client = chance.choice(clients)
        mine = open_ids[client]
        mine[:] = [one for one in mine if not world.answers[client, one, "end"]]
        if len(mine) < OPEN:
            name, number, tokens = str(number), number + 1, chance.randint(1, LONGEST)
            if chance.random() < 0.05:
                world.say(client, t="cancel", id=name)
                aborted["before"] += 1
            world.say(client, t="generate", id=name, prompt="ab", max_tokens=tokens)
            world.asked[client, name] = tokens
            mine.append(name)
        for _ in range(chance.randrange(30)):
            world.turn()
        other = chance.choice(clients)
        kind, name = chance.choice(
            [("open", chance.choice(mine))] * 3
            + [("ended", str(chance.randrange(number))), ("unknown", "never")]
            + [("another's", one) for one in open_ids[other][:1] if other != client]
        )
        world.say(client, t="cancel", id=name)
        aborted[kind] += 1
        if chance.random() < 0.4:
            world.say(client, t="cancel", id=name)
            aborted["twice"] += 1
    while world.turn():
        pass
    assert min(aborted.values()) > 100
    check_ends(world)
    check_tables(world)


def check_ends(world: World) -> None:
    """One end each; who was not cancelled has all its tokens, and all ways to end were met."""
    reasons: Counter[str] = Counter()
    for (client, name), tokens in world.asked.items():
        assert world.answers[client, name, "end"] == 1
        reason = next(one for one in ("length", "cancelled") if world.answers[client, name, one])
        got = world.tokens[client, name]
        assert got == tokens if reason == "length" else got <= tokens
        accepted = world.answers[client, name, "accepted"]
        reasons[f"{reason} {'accepted' if accepted else 'before'} {min(got, 1)}"] += 1
    expected = {
        "length accepted 1",
        "cancelled before 0",
        "cancelled accepted 0",
        "cancelled accepted 1",
    }
    assert set(reasons) == expected
    assert min(reasons.values()) > 100


def check_tables(world: World) -> None:
    """Nobody remembers anything of them."""
    executor, policy, actor = world.executor, world.policy, world.actor
    assert not executor.rows
    assert not executor.state.waiting
    assert not executor.mail
    load = policy.report(0)
    assert (load.running, load.queued, load.queued_tokens) == (0, 0, 0)
    assert not len(policy._running)
    assert not policy._queue._lines
    assert actor._intake.first() is None
    assert not len(actor._streams)
    sessions = world.tracker.sessions
    assert not sessions.open_requests
    assert sessions.generations == 0
    assert not any(session.open or session.generations for session in sessions.all())
    assert not world.tracker._unsent
