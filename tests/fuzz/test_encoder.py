"""The encoder's work and its control."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from hearth.actors import messages as m
from hearth.actors.encoder.actor import EncoderActor
from hearth.actors.encoder.image_decoder import ImageDecodeJob, ImageDecodeResult
from hearth.actors.messages import DropWork, Encode, EncodeFailed, Patched
from hearth.actors.supervisor_messages import SupervisorMessage
from hearth.runtime.images import Slot
from tests.actors.scheduler.images import work
from tests.fuzz.doors import DOORS, PER_TYPE, Flat
from tests.fuzz.mail import Inbox, Outbox
from tests.fuzz.mutations import mutations

ENCODE = msgspec.msgpack.encode
GOOD = Encode(1 << 40, work("good"), Slot(0, 64, 1), Slot(0, 64, 1))


class Decoder:
    """Two of three pictures are good; what it is given it has done at the second look."""

    descriptor = -1

    def __init__(self) -> None:
        self._given: list[ImageDecodeJob] = []
        self._done: list[ImageDecodeJob] = []

    def give(self, job: ImageDecodeJob) -> None:
        self._given.append(job)

    def drop(self, numbers: Iterable[int]) -> list[int]:
        gone = {job.number for job in self._given}.intersection(numbers)
        self._given = [job for job in self._given if job.number not in gone]
        return sorted(gone)

    def poll(self) -> list[ImageDecodeResult]:
        done, self._done, self._given = self._done, self._given, []
        return [
            ImageDecodeResult(job.number) if job.number % 3 else _broken(job.number) for job in done
        ]

    def close(self) -> None:
        pass


def _broken(number: int) -> ImageDecodeResult:
    return ImageDecodeResult(number, code="image_invalid", message="it is broken")


class House:
    """An encoder that gets its mail whenever it would wait, and another when it has ended."""

    def __init__(self) -> None:
        self.work = Inbox(m.EncoderMessage)
        self.control = Inbox(m.EncoderControl)
        self.scheduler = Outbox(m.SchedulerMessage)
        self.supervisor = Outbox(SupervisorMessage)
        self.owed: set[int] = set()
        self.answered: Counter[int] = Counter()
        self.told = 0
        self._known = msgspec.msgpack.Decoder(m.EncoderMessage)
        self._mail: Iterator[tuple[Inbox, bytes]] = iter(())
        self.left = False
        self._turns = 0

    def run(self, mail: Iterator[tuple[Inbox, bytes]]) -> None:
        """Handle all of it."""
        self._mail, self.left = mail, True
        while self.left:
            decoder: Any = Decoder()
            EncoderActor(
                name="encoder-1",
                inbox=self.work,
                control=self.control,
                to_scheduler=self.scheduler,
                to_supervisor=self.supervisor,
                decoder=decoder,
                tower=None,
            ).run()
            self.owed.clear()

    def more(self, *_: object) -> None:
        """Instead of a wait: every third time there is mail."""
        self.supervisor.take()
        for message in self.scheduler.take():
            assert isinstance(message, Patched | EncodeFailed)
            assert message.number in self.owed
            self.owed.remove(message.number)
        self._turns += 1
        if self._turns % 3:
            return
        assert not self.owed, "everything is answered"
        try:
            inbox, data = next(self._mail)
        except StopIteration:
            self.left = False
            inbox, data = self.control, ENCODE(m.Shutdown())
        inbox.put(data)
        self.told += 1
        if inbox is self.work:
            self._note(data)

    def _note(self, data: bytes) -> None:
        try:
            message = self._known.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        if isinstance(message, Encode):
            self.owed.add(message.number)


@pytest.mark.parametrize("which", ["EncoderMessage", "EncoderControl"])
def test_every_message_to_the_encoder(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    monkeypatch.setattr("hearth.actors.encoder.actor.wait_any", house.more)
    inbox = house.work if which == "EncoderMessage" else house.control
    given = {"number": [1, 2, 3], "numbers": [[1], [2, 3]]}

    def mail(part: int) -> Iterator[tuple[Inbox, bytes]]:
        for kind in DOORS[which]:
            for data in mutations(kind, f"{kind} {part}", -(-PER_TYPE // 4), ENCODE, given):
                yield inbox, data

    house.run(mail(0))
    flat, before = Flat(), house.told
    for part in (1, 2, 3):
        house.run(mail(part))
    flat.check(house.told - before)
    assert house.told >= PER_TYPE * len(DOORS[which])
    house.run(iter([(house.work, ENCODE(GOOD))]))


def test_one_number_twice_is_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    monkeypatch.setattr("hearth.actors.encoder.actor.wait_any", house.more)
    house.work.put(ENCODE(GOOD))
    house.owed.add(GOOD.number)
    house.run(iter([(house.work, ENCODE(GOOD)), (house.work, ENCODE(DropWork([GOOD.number])))]))
