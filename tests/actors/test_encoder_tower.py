"""What becomes of pictures whose tower fails, or for which nobody waits any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import zmq

from hearth.actors.arena import Arena
from hearth.actors.encoder import actor as encoder
from hearth.actors.encoder.actor import EncoderActor, Tower
from hearth.actors.encoder.image_decoder import ImageDecoder
from hearth.actors.executor.vision_encoder_memory import VisionEncoderMemory
from hearth.actors.mailbox import MailboxFull, Receiver, Sender
from hearth.actors.messages import (
    DropWork,
    Encode,
    Encoded,
    EncodeFailed,
    EncoderControl,
    EncoderMessage,
    ImageWork,
    SchedulerMessage,
    Shutdown,
    Visual,
)
from hearth.actors.supervisor_messages import SupervisorMessage
from hearth.runtime.errors import HearthError
from hearth.runtime.images import ImageLayout
from tests.actors import odd_decoder
from tests.actors.mail import next_mail
from tests.runtime.vision.fake_tower import fake_runner
from tests.runtime.vision.tower_config import config_of

PATIENCE_S = 30.0
CONFIG = config_of("qwen3_vl", position_side=4, patch_size=2, max_patches=32, hidden_size=16)


class House:
    """The neighbours of an encoder whose process decodes nothing, and whose tower is a fake."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.arenas = [Arena.create(name, 1 << 20) for name in ("pictures", "patches", "embedded")]
        self.patches, self.embeddings = (arena.slots() for arena in self.arenas[1:])
        self.work: Sender[EncoderMessage] = Sender(self.context, "inproc://work", 100)
        self.control: Sender[EncoderControl] = Sender(self.context, "inproc://control", 100)
        self.scheduler: Receiver[SchedulerMessage] = self.bind("scheduler", SchedulerMessage)
        self.supervisor: Receiver[SupervisorMessage] = self.bind("supervisor", SupervisorMessage)
        self.to_supervisor: Sender[SupervisorMessage] = Sender(
            self.context, "inproc://supervisor", 100
        )
        runner, self.engine = fake_runner(CONFIG)
        self.before_call: Callable[[int], None] = lambda _patches: None
        run = self.engine.run

        def run_when_told(bindings: Any, stream: Any) -> None:
            arrays = {one.name: one.tensor.view(one.shape) for one in bindings}
            self.before_call(len(arrays["patches"]))
            run(bindings, stream)

        self.engine.run = run_when_told  # type: ignore[method-assign, assignment]
        self.actor = EncoderActor(
            name="encoder-1",
            inbox=self.bind("work", EncoderMessage),
            control=self.bind("control", EncoderControl),
            to_scheduler=Sender(self.context, "inproc://scheduler", 100),
            to_supervisor=self.to_supervisor,
            decoder=ImageDecoder(
                CONFIG,
                self.arenas[0].shared,
                self.arenas[1].shared,
                timeout_s=PATIENCE_S,
                memory=1 << 27,
                program=odd_decoder.PROGRAM,
            ),
            tower=Tower(runner, VisionEncoderMemory(CONFIG, *self.arenas[1:])),
        )
        self.failure: HearthError | None = None
        self.thread = threading.Thread(target=self.run)

    def bind(self, name: str, kind: Any) -> Receiver[Any]:
        return Receiver(self.context, [f"inproc://{name}"], kind, 100)

    def run(self) -> None:
        try:
            self.actor.run()
        except HearthError as error:
            self.failure = error

    def encode(self, number: int, time: int = 1) -> None:
        layout = ImageLayout(height=0, width=0, grid=(time, 4, 4), tokens=4 * time)
        patches = self.patches.take(layout.patches * CONFIG.patch_bytes)
        target = self.embeddings.take(4 * layout.tokens * CONFIG.output_size)
        assert patches is not None
        assert target is not None
        self.arenas[1].array(patches, (patches.size,), np.dtype(np.uint8))[:] = number
        work = ImageWork(b"", Visual([]), layout)
        self.work.post(Encode(number, work, patches, target))

    def hear(self) -> tuple[int, str]:
        """The number of the next picture that is answered, and the code of its failure."""
        told = next_mail(self.scheduler, PATIENCE_S)
        assert isinstance(told, Encoded | EncodeFailed)
        return told.number, getattr(told, "code", "")

    def close(self) -> None:
        with suppress(MailboxFull):  # it may have ended before
            self.control.post(Shutdown())
        if self.thread.ident is None:
            self.thread.start()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        for end in (self.work, self.control, self.scheduler, self.supervisor, self.to_supervisor):
            end.close()
        for arena in self.arenas:
            arena.close()
        self.context.term()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def test_it_ends_when_told_to_without_another_wait(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    monkeypatch.setattr("hearth.actors.encoder.actor.wait_any", lambda *given: waits.append(given))
    house.control.post(Shutdown())
    house.thread.start()
    house.thread.join(PATIENCE_S)
    assert waits == []


def test_pictures_that_fail_together_are_tried_one_by_one(house: House) -> None:
    def fail(patches: int) -> None:
        if patches > 16:
            raise HearthError("out_of_memory", "as asked")

    house.before_call = fail
    for number in (1, 2, 3):
        house.encode(number)
    house.thread.start()
    assert sorted(house.hear() for _ in range(3)) == [(1, ""), (2, ""), (3, "")]


def test_a_tower_that_fails_again_and_again_is_given_up(house: House) -> None:
    def fail(_: int) -> None:
        raise HearthError("executor_failed", "as asked")

    house.before_call = fail
    for number in (1, 2, 3):
        house.encode(number, time=2)
    house.thread.start()
    assert [house.hear() for _ in range(3)] == [(n, "executor_failed") for n in (1, 2, 3)]
    house.thread.join(PATIENCE_S)
    assert house.failure is not None
    assert house.failure.code == "encoder_failed"


def test_a_video_is_left_in_its_middle_when_nobody_waits_for_it(house: House) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: int) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    house.before_call = wait
    house.encode(1, time=20)
    house.thread.start()
    assert begun.wait(PATIENCE_S)
    house.encode(3)
    house.work.post(DropWork([1, 3]))
    # Both have been read by then.
    assert house.hear() == (3, "cancelled")
    house.encode(2)
    go_on.set()
    assert [house.hear(), house.hear()] == [(1, "cancelled"), (2, "")]
    assert house.engine.calls == [32, 16]


def test_mail_is_read_while_the_tower_is_at_a_call(house: House) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: int) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    house.before_call = wait
    house.encode(1)
    house.thread.start()
    assert begun.wait(PATIENCE_S)
    while next_mail(house.supervisor, 0) is not None:
        pass
    house.encode(2)
    house.work.post(DropWork([2]))
    assert house.hear() == (2, "cancelled")
    assert next_mail(house.supervisor, PATIENCE_S) is not None
    go_on.set()
    assert house.hear() == (1, "")


def test_a_call_that_does_not_end_shows_no_progress(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "CALL_S", -1.0)
    monkeypatch.setattr(encoder, "PROGRESS_S", 0.01)
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: int) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    house.before_call = wait
    house.encode(1)
    house.thread.start()
    assert begun.wait(PATIENCE_S)
    while next_mail(house.supervisor, 0) is not None:
        pass
    assert next_mail(house.supervisor, 0.2) is None
    go_on.set()
    assert house.hear() == (1, "")
    assert next_mail(house.supervisor, PATIENCE_S) is not None


def test_an_encoder_without_its_process_ends_also_in_a_call(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = threading.Event()

    def poll() -> None:
        raised.set()
        raise HearthError("encoder_failed", "as asked")

    def wait(_: int) -> None:
        monkeypatch.setattr(house.actor._decoder, "poll", poll)
        assert raised.wait(PATIENCE_S)

    house.before_call = wait
    house.encode(1)
    house.thread.start()
    house.thread.join(PATIENCE_S)
    assert house.failure is not None
    assert house.failure.message == "as asked"


def test_what_is_dropped_while_it_is_decoded_sees_no_tower(house: House) -> None:
    # The process has two pictures at once.
    house.actor._decoder.wait_ready()
    for number in (1, 2, 3):
        house.encode(number)
    house.work.post(DropWork([1, 2, 3, 4]))
    house.thread.start()
    assert sorted(house.hear() for _ in range(3)) == [(n, "cancelled") for n in (1, 2, 3)]
    assert house.engine.calls == []
