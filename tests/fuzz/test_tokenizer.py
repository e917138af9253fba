"""The tokenizer's inbox."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec

from hearth.actors import messages as m
from hearth.actors.tokenizer.actor import TokenizerActor
from hearth.runtime.request import RowToken
from tests.actors.tokenizer.vision_inputs import IMAGE, VisionInputs, turn
from tests.fuzz.doors import all_mutations
from tests.fuzz.mail import Inbox, Outbox

ENCODE = msgspec.msgpack.encode
GIVEN = {"rid": [1, 2, 3, 4], "incarnation": [0, 1, 2], "rids": [[1], [1, 2]], "stop": [[], ["a"]]}
KEPT_OPEN = 8


class House:
    """A tokenizer and what it says, held behind every message to one answer at most."""

    def __init__(self, folder: Path) -> None:
        self.inbox = Inbox(m.TokenizerMessage)
        self.scheduler = Outbox(m.SchedulerMessage)
        self.control = Outbox(m.SchedulerControl)
        self.door = Outbox(m.DoorMessage)
        inputs = VisionInputs(folder)
        self.picture = inputs.send()
        self.actor = TokenizerActor(
            inbox=self.inbox,
            to_scheduler=self.scheduler,
            to_scheduler_control=self.control,
            to_door=self.door,
            tokenizer=inputs.tokenizer,
            images=inputs.images,
        )
        self._known = msgspec.msgpack.Decoder(m.TokenizerMessage)
        self.opened: list[int] = []

    async def tell(self, data: bytes) -> list[m.DoorMessage | m.SchedulerMessage]:
        """Let this arrive, and wait until it is answered, if it is."""
        before = self.inbox.undecodable
        self.inbox.put(data)
        await self.inbox.handled.wait()
        while self.actor._intake.first() or self.actor._bulk.first():
            await anyio.lowlevel.checkpoint()
        heard = [*self.door.take(), *self.scheduler.take()]
        self.control.take()
        if self.inbox.undecodable > before:
            assert heard == []
            return heard
        message = self._known.decode(data)
        if isinstance(message, m.Request | m.Convert):
            (answer,) = heard
            assert answer_of(answer) == message.rid
            if isinstance(answer, m.Request):
                self.opened.append(message.rid)
        failed = [rid for one in heard if isinstance(one, m.Failed) for rid in one.rids]
        assert len(failed) == len(set(failed)) or isinstance(message, m.Failed | m.StepOutput)
        return heard

    async def drop(self) -> None:
        """Cancel the requests that have been open for longest."""
        while len(self.opened) > KEPT_OPEN:
            await self.tell(ENCODE(m.Cancel(self.opened.pop(0))))

    async def works(self) -> None:
        """A good request is passed on, and its token comes as text."""
        (submit,) = await self.tell(ENCODE(m.Request(77, prompt="a")))
        assert isinstance(submit, m.Request)
        token = RowToken(77, submit.token_ids[0], finish="length")
        await self.tell(ENCODE(m.ExecutorReady(9, "w", m.ExecutorLimits(1, 1, 1))))
        step = m.StepOutput(9, 1, 1, [token], 1.0)
        heard = await self.tell(ENCODE(step))
        (deltas,) = [one for one in heard if isinstance(one, m.Deltas)]
        assert (deltas.rows[0].text, deltas.rows[0].finish) == ("a", "length")
        asked = m.Request(78, turns=[turn(IMAGE)], visuals=[self.picture])
        (submit,) = await self.tell(ENCODE(asked))
        assert isinstance(submit, m.Request)
        assert len(submit.images) == 1


def answer_of(message: m.DoorMessage | m.SchedulerMessage) -> int:
    """The request that a message is about."""
    if isinstance(message, m.Failed):
        return message.rids[0]
    assert isinstance(message, m.Request | m.Converted)
    return message.rid


async def test_every_message_to_the_tokenizer(tmp_path: Path) -> None:
    house, told = House(tmp_path), 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(house.actor.run)
        for data in all_mutations("TokenizerMessage", ENCODE, GIVEN):
            await house.tell(data)
            await house.drop()
            told += 1
        await house.works()
        tasks.cancel_scope.cancel()
    assert 0 < house.inbox.undecodable < told
