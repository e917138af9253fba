"""A front door on a real socket, in a thread of its own, before actors that play by the prompt."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import zmq
from anyio.abc import TaskGroup
from anyio.from_thread import BlockingPortal, start_blocking_portal

from hearth.actors import messages as m
from hearth.actors.arena import Arena
from hearth.actors.mailbox import Receiver, Sender
from hearth.actors.messages import ImageTimes
from hearth.actors.settings import PolicySettings
from hearth.daemon.door.finished import Listener
from hearth.daemon.door.front_door import FrontDoor
from hearth.daemon.door.keys import Keys
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.state import DoorFacts
from hearth.daemon.service_state import ServiceState
from hearth.runtime.request import FinishReason, RowRound, RowToken, TopLogprob
from hearth.runtime.text.reply_parser import CallPiece

T = TypeVar("T")
LIMIT = 2000
BACKENDS: list[dict[str, Any]] = [{}, {"use_uvloop": True}]
FACTS = DoorFacts(
    server="hearth test", model="toy", prompt_tokens=50, total_tokens=100, engine={"layers": 2}
)


class FakeActors:
    """Tokenizer, scheduler and executor in one; what to do is the first word of the prompt.

    count: `max_tokens` tokens "0 ", "1 ", ... at `step_s`; hang: accepted and no more; silent:
    nothing at all; fail: accepted, one token, then a failure; blind: accepted, then image 1 is
    broken; early: tokens before `accepted`; flood: as count without pauses and 1,000 characters a
    token; logprobs: one token with them; calls: reasoning, a call in pieces and the end of a stop
    string, also where there are tools and no result of one; speculate: two rounds of three and one
    token before `accepted`, and one after it. What has images is embedded once the first token has
    been told.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], step_s: float) -> None:
        self.step_s = step_s
        self.prepared: list[m.Request] = []
        self.heard: dict[int, float] = {}
        self.cancelled: list[int] = []
        self.control_cancelled: list[int] = []
        self.tokenizer: Receiver[m.TokenizerMessage] = Receiver(
            context, ["inproc://tokenizer"], m.TokenizerMessage, LIMIT
        )
        self.scheduler: Receiver[m.SchedulerMessage] = Receiver(
            context, ["inproc://scheduler"], m.SchedulerMessage, LIMIT
        )
        self.control: Receiver[m.SchedulerControl] = Receiver(
            context, ["inproc://control"], m.SchedulerControl, LIMIT
        )
        self.to_door: Sender[m.DoorMessage] = Sender(context, "inproc://door", LIMIT)

    def ends(self) -> list[Receiver[Any] | Sender[Any]]:
        return [self.tokenizer, self.scheduler, self.control, self.to_door]

    async def run(self, tasks: TaskGroup) -> None:
        tasks.start_soon(self._watch_scheduler)
        tasks.start_soon(self._watch_control)
        while True:
            message = await self.tokenizer.receive()
            if isinstance(message, m.Request):
                self.prepared.append(message)
                tasks.start_soon(self._play, message)
            elif isinstance(message, m.Convert):
                await self._convert(message)
            elif isinstance(message, m.Cancel):
                self.cancelled.append(message.rid)

    async def _watch_scheduler(self) -> None:
        while True:
            message = await self.scheduler.receive()
            if isinstance(message, m.AskReport):
                await self._send(m.SchedulerReport(message.rid, 1, 8, 2, 30, 5, 6, 7))

    async def _watch_control(self) -> None:
        while True:
            message = await self.control.receive()
            if isinstance(message, m.Cancel):
                self.control_cancelled.append(message.rid)

    async def _convert(self, message: m.Convert) -> None:
        if message.tokens is not None:
            await self._send(m.Converted(message.rid, text="".join(map(chr, message.tokens))))
        elif message.text != "silent":
            turns = message.chat.turns if message.chat else []
            text = message.text or "".join(turn.content for turn in turns)
            await self._send(m.Converted(message.rid, tokens=[ord(c) for c in text]))

    async def _play(self, message: m.Request) -> None:
        text, rid = self._text(message), message.rid
        word = (text.split() or [""])[0]
        self.heard[rid] = time.monotonic()
        accepted = m.Accepted(rid, len(text), self.heard[rid])
        if word == "silent":
            return
        if word == "early":
            await self._send(self._row(rid, 0))
        if word == "speculate":
            await self._send(self._round(rid, 3))
            await self._send(self._round(rid, 1))
        await self._send(accepted)
        if word == "fail":
            await self._send(self._row(rid, 0))
            await self._send(m.Failed([rid], "executor_failed", "the executor died", "device"))
        elif word == "blind":
            await self._send(m.Failed([rid], "image_invalid", "it is broken", "images[1]"))
        elif word == "speculate":
            await self._send(self._round(rid, 2, finish="stop"))
        elif word in {"logprobs", "calls"}:
            for row in self._logprobs(rid) if word == "logprobs" else self._calls(message):
                await self._send(m.Deltas([row], time.monotonic()))
        elif word != "hang":
            await self._count(message, 1 if word == "early" else 0, flood=word == "flood")

    async def _count(self, message: m.Request, first: int, *, flood: bool) -> None:
        limit = message.options.max_tokens or 256
        for index in range(first, limit):
            if message.rid in self.cancelled:
                return
            await anyio.sleep(0 if flood else self.step_s)
            last = index == limit - 1
            await self._send(self._row(message.rid, index, last=last, width=1000 * flood))
            if index == first:
                await self._play_siblings(message)
            if message.visuals and index == first:
                times = ImageTimes(0.001, 0.002, 0.003)
                await self._send(m.Embedded(message.rid, 12, 1, times))

    async def _play_siblings(self, message: m.Request) -> None:
        """Let each further reply have a token more than the one before."""
        for place, rid in enumerate(message.siblings, 1):
            self.heard[rid] = self.heard[message.rid]
            await self._send(m.Accepted(rid, 1, self.heard[rid]))
            for index in range(1 + place):
                await self._send(self._row(rid, index, last=index == place))

    def _row(self, rid: int, index: int, *, last: bool = False, width: int = 0) -> m.Deltas:
        """A token; the first one, and each tenth, as of a reply put back, tells of its place."""
        row = m.RowDelta(
            rid, f"{index} ".ljust(width, "."), [index], finish="length" if last else None
        )
        placed = {} if index % 10 else {rid: self.heard[rid]}
        cached = dict.fromkeys(placed, index + 3)
        return m.Deltas([row], time.monotonic(), placed, detokenize_s=0.25, cached=cached)

    @staticmethod
    def _text(message: m.Request) -> str:
        if message.chat is None:
            return message.prompt or ""
        turn = message.chat.turns[-1]
        if message.chat.tools and turn.role == "user":
            return "calls"
        return turn.content or "".join(part.text for part in turn.parts)

    @staticmethod
    def _logprobs(rid: int) -> list[m.RowDelta]:
        token = RowToken(0, 65, -0.5, (TopLogprob(65, -0.5), TopLogprob(66, -1.5)))
        return [m.RowDelta(rid, "A", [65], logprobs=[token], finish="stop")]

    @staticmethod
    def _calls(message: m.Request) -> list[m.RowDelta]:
        rid, tools = message.rid, message.chat.tools if message.chat else []
        name = tools[0].name if tools else "f"
        return [
            m.RowDelta(rid, "", [1], reasoning="hm", reasoning_tokens=1),
            m.RowDelta(rid, "ok", [2, 3], calls=[CallPiece(0, "c1", name, '{"a"')]),
            m.RowDelta(
                rid,
                "",
                [4],
                calls=[CallPiece(0, arguments=": 1}"), CallPiece(0, complete=True)],
                finish="tool_calls",
                stop_string="END",
            ),
        ]

    @staticmethod
    def _round(rid: int, count: int, finish: FinishReason | None = None) -> m.Deltas:
        row = m.RowDelta(rid, "x" * count, [7] * count, finish=finish)
        rounds = [RowRound(rid, 5, count), RowRound(rid + 1000, 5, 5)]
        return m.Deltas([row], time.monotonic(), rounds=rounds)

    async def _send(self, message: m.DoorMessage) -> None:
        await self.to_door.send(message, 5)


class Harness:
    """What a test may touch; `on_loop` runs a callable in the door's thread."""

    def __init__(self, portal: BlockingPortal, path: Path) -> None:
        self.portal = portal
        self.path = path
        self.door: FrontDoor
        self.actors: FakeActors

    def on_loop(self, function: Callable[[], T]) -> T:
        return self.portal.call(function)

    def totals(self) -> dict[str, int]:
        return dict(self.on_loop(lambda: self.door._state.totals))

    def sessions(self) -> int:
        return self.on_loop(lambda: len(self.door._tracker.sessions))

    async def serve(
        self,
        limits: tuple[DoorSettings, PolicySettings],
        step_s: float,
        listeners: Sequence[Listener],
        keys: Keys | None,
        arena: Arena | None,
        *,
        task_status: anyio.abc.TaskStatus[None],
    ) -> None:
        with zmq.Context() as context, ExitStack() as ends:
            inbox: Receiver[m.DoorMessage] = Receiver(
                context, ["inproc://door"], m.DoorMessage, LIMIT
            )
            self.actors = FakeActors(context, step_s)
            outboxes: list[Sender[Any]] = [
                Sender(context, f"inproc://{name}", LIMIT)
                for name in ("tokenizer", "scheduler", "control")
            ]
            for end in [inbox, *outboxes, *self.actors.ends()]:
                ends.enter_context(closing(end))
            self.door = FrontDoor(
                *limits,
                inbox=inbox,
                to_tokenizer=outboxes[0],
                to_scheduler=outboxes[1],
                to_scheduler_control=outboxes[2],
                facts=FACTS,
                environ={},
                listeners=listeners,
                keys=keys,
                pictures=arena,
            )
            self.door.tell(ServiceState("ready"))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.actors.run, tasks)
                await tasks.start(self.door.run)
                task_status.started()
                await self.door.ended.wait()
                tasks.cancel_scope.cancel()


@contextmanager
def running_door(
    backend: dict[str, Any] | None = None,
    *,
    step_s: float = 0.001,
    path: Path | None = None,
    listeners: Sequence[Listener] = (),
    keys: Keys | None = None,
    arena: Arena | None = None,
    queue_requests: int = 256,
    **limits: Any,
) -> Iterator[Harness]:
    with (
        tempfile.TemporaryDirectory(prefix="hd") as folder,
        start_blocking_portal(backend_options=backend or {}) as portal,
    ):
        harness = Harness(portal, path or Path(folder) / "h.sock")
        settings = DoorSettings(socket=str(harness.path), **limits)
        both = settings, PolicySettings(queue_requests=queue_requests)
        serve = partial(harness.serve, both, step_s, listeners, keys, arena)
        serving, _ = portal.start_task(serve)
        try:
            yield harness
        finally:
            portal.call(harness.door.stop)
            serving.result(10)


@contextmanager
def raw_client(path: Path, kind: int = zmq.DEALER) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.setsockopt(zmq.SNDTIMEO, 5000)
        socket.connect(f"ipc://{path}")
        yield socket


def say(socket: zmq.Socket[bytes], *frames: Any) -> None:
    socket.send_multipart(
        [f if isinstance(f, bytes) else msgspec.msgpack.encode(f) for f in frames]
    )


def hear(socket: zmq.Socket[bytes]) -> dict[str, Any]:
    message: dict[str, Any] = msgspec.msgpack.decode(socket.recv())
    return message


def greet(socket: zmq.Socket[bytes], **fields: Any) -> dict[str, Any]:
    say(socket, {"t": "hello", "proto": [1], **fields})
    return hear(socket)


def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come to pass"
        time.sleep(0.005)
