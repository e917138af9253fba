"""The scheduler's inbox and its control."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
import zmq

from hearth.actors import messages as m
from hearth.actors.mailbox import Sender
from hearth.actors.messages import (
    Encode,
    Encoded,
    EncoderReady,
    ExecutorMessage,
    ImageTimes,
    Schedule,
)
from hearth.actors.scheduler.actor import SchedulerActor
from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.actors.settings import PolicySettings
from tests.actors.scheduler.images import arenas, submit_images
from tests.fuzz.doors import all_mutations
from tests.fuzz.mail import Inbox, Outbox

ENCODE = msgspec.msgpack.encode
SETTINGS = PolicySettings(queue_requests=12, queue_tokens=200, ageing_s=1.0)
LIMITS = m.ExecutorLimits(4, 50, 100)
TURNS = 4


class House:
    """A scheduler between actors that are played; every message takes a tenth of a second."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.inbox = Inbox(m.SchedulerMessage)
        self.control = Inbox(m.SchedulerControl)
        self.tokenizer = Outbox(m.TokenizerMessage)
        self.door = Outbox(m.DoorMessage)
        self.executor: list[Outbox] = []
        self.now = 0.0
        self.incarnation, self.number = 1, 1 << 30
        self.context = context
        self.actor = SchedulerActor(
            inbox=self.inbox,
            control=self.control,
            to_tokenizer=self.tokenizer,
            to_door=self.door,
            connect=self.connect,
            policy=SchedulerPolicy(SETTINGS, arenas(patches=4, embeddings=4)),
            clock=lambda: self.now,
        )
        self.submitted: Counter[int] = Counter()
        self.rids = [1]
        self._next = 1

    def connect(self, endpoint: str) -> Sender[Any]:
        """What can be connected is played."""
        Sender[Any](self.context, endpoint, 1).close()
        kinds = ExecutorMessage | m.EncoderMessage
        self.executor = [*self.executor[-2:], Outbox(kinds)]
        return self.executor[-1]

    async def tell(self, inbox: Inbox, data: bytes) -> list[Any]:
        """Let this arrive, and wait until it is carried out; what is said of it."""
        self.now += 0.1
        inbox.put(data)
        await inbox.handled.wait()
        for _ in range(TURNS):
            await anyio.lowlevel.checkpoint()
        heard = [*self.door.take(), *self.tokenizer.take()]
        for message in heard:
            if isinstance(message, m.Failed):
                self._failed(message)
        for one in self.executor:
            heard += one.take()
        return heard

    async def tell_good(self, inbox: Inbox, message: Any) -> list[Any]:
        return await self.tell(inbox, ENCODE(message))

    async def submit(self) -> list[Any]:
        """A request of a new number."""
        self._next += 1
        self.rids[:] = [*self.rids[-7:], self._next + (1 << 20)]
        return await self.tell_good(self.inbox, m.Request(self.rids[-1], token_ids=[1, 2]))

    async def play_executor(self, heard: list[Any]) -> None:
        """Take what is wanted, and end it at once, until nothing more is."""
        left = deque(heard)
        while left:
            message = left.popleft()
            if isinstance(message, Schedule):
                rids = list(message.new)
                left += await self.output(message, placed=rids)
                left += await self.output(message, finished=rids)

    async def output(self, seen: Schedule, **changes: Any) -> list[Any]:
        """Tell this of the executor's rows."""
        self.number += 1
        told = m.StepOutput(seen.incarnation, self.number, seen.seq, **changes)
        return await self.tell_good(self.inbox, told)

    async def works(self) -> None:
        """With a new executor, a new request gets its place."""
        self.incarnation += 1
        self.number = 1 << 30
        ready = m.ExecutorReady(self.incarnation, "ipc:///nowhere/w", LIMITS)
        await self.play_executor(await self.tell_good(self.inbox, ready))
        for _ in range(30):
            await self.play_executor(await self.tell_good(self.inbox, m.AskReport(1)))
        self.now += 3600.0
        heard = await self.submit() + await self.tell_good(self.inbox, m.AskReport(1))
        await self.play_executor(heard)
        kinds = {type(one) for one in heard}
        assert {m.Accepted, Schedule} <= kinds, heard
        await self.sees()

    async def sees(self) -> None:
        """With a new encoder, a new picture becomes embeddings, whatever was told before."""
        heard = await self.tell_good(self.control, EncoderReady("ipc:///nowhere/e"))
        self._next += 1
        rid = self._next + (1 << 20)
        heard += await self.tell_good(self.inbox, submit_images(rid, str(rid)))
        while works := [one.number for one in heard if isinstance(one, Encode)]:
            heard = []
            for number in works:
                heard += await self.tell_good(self.inbox, Encoded(number, ImageTimes()))
        assert rid in [one.rid for one in heard if isinstance(one, m.Embedded)]
        await self.play_executor(heard)

    def _failed(self, message: m.Failed) -> None:
        assert len(set(message.rids)) == len(message.rids)


@pytest.mark.parametrize("which", ["SchedulerMessage", "SchedulerControl"])
async def test_every_message_to_the_scheduler(which: str) -> None:
    with zmq.Context() as context:
        house = House(context)
        inbox = house.inbox if which == "SchedulerMessage" else house.control
        given = {
            "rid": house.rids,
            "rids": [house.rids],
            "incarnation": [1],
            "work": ["ipc:///nowhere/w"],
            "limits": [[4, 50, 100]],
            "client": [1, 2],
        }
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(house.actor.run)
            for told, data in enumerate(all_mutations(which, ENCODE, given)):
                if told % 5 == 0:
                    await house.play_executor(await house.submit())
                heard = await house.tell(inbox, data)
                await house.play_executor(heard)
                if told % 200 == 0:
                    await house.works()
            await house.works()
            tasks.cancel_scope.cancel()
