from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from numpy.typing import NDArray
from PIL import Image

from hearth.actors.addresses import SocketFolder
from hearth.actors.arena import Arena
from hearth.actors.encoder import actor as encoder
from hearth.actors.encoder.actor import EncoderActor, Tower
from hearth.actors.encoder.image_decoder import ImageDecoder
from hearth.actors.executor.vision_encoder_memory import VisionEncoderMemory
from hearth.actors.host import run_actor
from hearth.actors.mailbox import MailboxFull, Receiver, Sender, ZmqContext
from hearth.actors.messages import (
    DropWork,
    Encode,
    Encoded,
    EncodeFailed,
    EncoderControl,
    EncoderMessage,
    ImageInput,
    ImageWork,
    Patched,
    SchedulerMessage,
    Shutdown,
    Visual,
)
from hearth.actors.roles import EncoderSettings, HostConfig
from hearth.actors.settings import EncoderOptions
from hearth.actors.supervisor_messages import (
    ActorHello,
    ActorProgress,
    ActorReady,
    SupervisorMessage,
)
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.export.options import ExportOptions
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.image_processing.decoding import patch
from hearth.runtime.image_processing.sizes import layout_of, video_layout
from hearth.runtime.images import FileFormat, ImageLayout, Picture, Slot
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.vision_config import VISION_FOLDER, load_vision_config
from tests.actors.encoder import fake_decoder
from tests.actors.mailboxes import next_mail
from tests.runtime.image_processing.photographs import draw, file_of
from tests.runtime.vision.tower_config import config_of, fake_runner
from tests.vision_models import write_vision_model

PATIENCE_S = 30.0
GONE = Slot(0, 48, 999)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tower, and no more of the text than its configuration."""
    folder = tmp_path_factory.mktemp("engine")
    source = write_vision_model(folder / "model", "qwen3_vl")
    assert write_vision(source, folder, ExportOptions(dialect="classic")) is not None
    return folder


class Harness:
    """The neighbours of an encoder that runs in a thread, as its process would run it."""

    def __init__(self, folder: Path, engine: Path, context: ZmqContext, **options: Any) -> None:
        config = load_vision_config(engine)
        assert config is not None
        self.config, self.engine = config, engine
        self.arenas = [Arena.create(name, 1 << 22) for name in ("pictures", "patches", "embedded")]
        self.pictures, self.patches, self.embeddings = (one.slots() for one in self.arenas)
        addresses = SocketFolder(folder).addresses("encoder", 1)
        pictures, patches, embeddings = (arena.shared for arena in self.arenas)
        settings = EncoderSettings(
            engine=str(engine),
            options=RuntimeOptions(**options),
            own=EncoderOptions(nice=0, threads=1),
            pictures=pictures,
            patches=patches,
            embeddings=embeddings,
        )
        host = HostConfig(
            name="encoder-1",
            role="encoder",
            settings=msgspec.Raw(msgspec.json.encode(settings)),
            addresses=addresses,
            parent=os.getpid(),
        )
        self.supervisor: Receiver[SupervisorMessage] = Receiver(
            context, [addresses.supervisor], SupervisorMessage, 100
        )
        self.scheduler: Receiver[SchedulerMessage] = Receiver(
            context, [addresses.scheduler], SchedulerMessage, 100
        )
        self.work: Sender[EncoderMessage] = Sender(context, addresses.work, 10)
        self.control: Sender[EncoderControl] = Sender(context, addresses.control, 10)
        self.thread = threading.Thread(target=run_actor, args=(host, context))

    def put(self, data: bytes) -> Slot:
        slot = self.pictures.take(len(data))
        assert slot is not None
        self.arenas[0].view(slot)[:] = data
        return slot

    def encode(self, number: int, *frames: ImageInput) -> Encode:
        pictures = [one.picture for one in frames]
        layout = layout_of(pictures[0], self.config)
        if len(frames) > 1:
            layout = video_layout(pictures, [0.5 * place for place in range(len(frames))],
                                  self.config)  # fmt: skip
        outputs = 1 + self.config.num_deepstack_features
        patches = self.patches.take(layout.patches * self.config.patch_bytes)
        target = self.embeddings.take(4 * outputs * layout.tokens * self.config.output_size)
        assert patches is not None
        assert target is not None
        return Encode(number, ImageWork(b"key", Visual(list(frames)), layout), patches, target)

    def photo(self, size: tuple[int, int], kind: FileFormat = "png") -> ImageInput:
        return ImageInput(Picture(kind, *size), self.put(file_of(draw(*size), kind)))

    def post(self, *messages: EncoderMessage) -> None:
        for message in messages:
            self.work.post(message)

    def heard(self, count: int) -> dict[int, Any]:
        words = [next_mail(self.scheduler, PATIENCE_S) for _ in range(count)]
        return {word.number: word for word in words}

    def embedded(self, work: Encode) -> NDArray[Any]:
        config, layout = self.config, work.work.layout
        shape = (1 + config.num_deepstack_features, layout.tokens, config.output_size)
        return self.arenas[2].array(work.target, shape, np.dtype(np.float32))

    def expected(self, work: Encode, *frames: NDArray[np.uint8]) -> NDArray[Any]:
        """What the tower makes of pixels, without an actor."""
        config, layout = self.config, work.work.layout
        patches = np.empty((layout.patches, config.patch_bytes), np.uint8)
        for place, pixels in enumerate(frames):
            patch(Image.fromarray(pixels), layout, config, patches, frame=place)
        runner = VisionRunner.open(
            self.engine / VISION_FOLDER, config, EngineOptions(threads=1), CpuDevice()
        )
        (out,) = runner.encode([(patches, layout)])
        runner.close()
        return out

    def close(self) -> None:
        self.control.post(Shutdown())
        if self.thread.ident is not None:
            self.thread.join(PATIENCE_S)
            assert not self.thread.is_alive()
        for mailbox in (self.supervisor, self.scheduler, self.work, self.control):
            mailbox.close()
        for arena in self.arenas:
            arena.close()


@pytest.fixture
def harness(short_folder: Path, engine: Path, request: pytest.FixtureRequest) -> Iterator[Harness]:
    context: ZmqContext = zmq.Context()
    made = Harness(short_folder, engine, context, **getattr(request, "param", {}))
    yield made
    made.close()
    context.term()


def test_pictures_of_several_requests_get_their_embeddings(harness: Harness) -> None:
    raw = draw(40, 56)
    raw_input = ImageInput(Picture("rgb8", 40, 56, 120), harness.put(raw.tobytes()))
    works = [
        harness.encode(1, harness.photo((96, 64))),
        harness.encode(2, raw_input),
        harness.encode(
            3, harness.photo((64, 64)), harness.photo((64, 64)), harness.photo((64, 64))
        ),
    ]
    harness.post(*works)
    harness.thread.start()
    life = [next_mail(harness.supervisor, PATIENCE_S) for _ in range(3)]
    assert [type(one) for one in life] == [ActorHello, ActorReady, ActorProgress]
    words = harness.heard(3)
    pixels = [[draw(96, 64)], [raw], [draw(64, 64)] * 3]
    for work, frames in zip(works, pixels, strict=True):
        word = words[work.number]
        assert isinstance(word, Encoded)
        assert min(word.times.decode_s, word.times.resize_s, word.times.engine_s) > 0
        expected = harness.expected(work, *frames)
        np.testing.assert_allclose(harness.embedded(work), expected, atol=1e-5)


def test_what_is_no_picture_fails_alone(harness: Harness) -> None:
    good = harness.photo((64, 64))
    cut = ImageInput(Picture("jpeg", 64, 64), harness.put(file_of(draw(64, 64), "jpeg")[:700]))
    other = ImageInput(Picture("png", 640, 640), good.slot)
    gone = ImageInput(Picture("png", 64, 64), GONE)
    works = [harness.encode(n, one) for n, one in enumerate((good, cut, other, gone, good), 1)]
    harness.post(*works)
    harness.thread.start()
    words = harness.heard(5)
    codes = [getattr(words[number], "code", "") for number in range(1, 6)]
    assert codes == ["", "image_invalid", "image_invalid", "internal", ""]
    assert np.array_equal(harness.embedded(works[0]), harness.embedded(works[4]))


def test_memory_that_has_been_given_to_another_is_not_written(harness: Harness) -> None:
    photo = harness.photo((64, 64))
    work, other = harness.encode(1, photo), harness.encode(2, photo)
    harness.post(msgspec.structs.replace(work, target=GONE), other)
    harness.thread.start()
    words = harness.heard(2)
    assert [type(words[1]), type(words[2])] == [EncodeFailed, Encoded]
    assert words[1].code == "internal"


def test_each_piece_of_work_is_answered_once_also_what_nobody_waits_for(harness: Harness) -> None:
    photo = harness.photo((64, 64))
    harness.post(*(harness.encode(number, photo) for number in (1, 2, 3)), DropWork([2, 7]))
    harness.thread.start()
    words = harness.heard(3)
    assert sorted(words) == [1, 2, 3]
    assert getattr(words[2], "code", "cancelled") == "cancelled"


@pytest.mark.parametrize("harness", [{"device": "cuda"}], indirect=True)
def test_where_an_executor_has_the_tower_patches_are_all(harness: Harness) -> None:
    work = harness.encode(1, harness.photo((96, 64)))
    harness.post(work)
    harness.thread.start()
    assert isinstance(harness.heard(1)[1], Patched)
    layout, config = work.work.layout, harness.config
    shape, patches = (layout.patches, config.patch_bytes), np.dtype(np.uint8)
    expected = np.empty(shape, np.uint8)
    patch(Image.fromarray(draw(96, 64)), layout, config, expected)
    assert np.array_equal(harness.arenas[1].array(work.patches, shape, patches), expected)


CONFIG = config_of("qwen3_vl", position_side=4, patch_size=2, max_patches=32, hidden_size=16)


class TowerHarness:
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
                program=fake_decoder.PROGRAM,
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
def tower_harness() -> Iterator[TowerHarness]:
    made = TowerHarness()
    yield made
    made.close()


def test_it_ends_when_told_to_without_another_wait(
    tower_harness: TowerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    monkeypatch.setattr("hearth.actors.encoder.actor.wait_any", lambda *given: waits.append(given))
    tower_harness.control.post(Shutdown())
    tower_harness.thread.start()
    tower_harness.thread.join(PATIENCE_S)
    assert waits == []


def test_pictures_that_fail_together_are_tried_one_by_one(tower_harness: TowerHarness) -> None:
    def fail(patches: int) -> None:
        if patches > 16:
            raise HearthError("out_of_memory", "as asked")

    tower_harness.before_call = fail
    for number in (1, 2, 3):
        tower_harness.encode(number)
    tower_harness.thread.start()
    assert sorted(tower_harness.hear() for _ in range(3)) == [(1, ""), (2, ""), (3, "")]


def test_a_tower_that_fails_again_and_again_is_given_up(tower_harness: TowerHarness) -> None:
    def fail(_: int) -> None:
        raise HearthError("executor_failed", "as asked")

    tower_harness.before_call = fail
    for number in (1, 2, 3):
        tower_harness.encode(number, time=2)
    tower_harness.thread.start()
    assert [tower_harness.hear() for _ in range(3)] == [(n, "executor_failed") for n in (1, 2, 3)]
    tower_harness.thread.join(PATIENCE_S)
    assert tower_harness.failure is not None
    assert tower_harness.failure.code == "encoder_failed"


def test_a_video_is_left_in_its_middle_when_nobody_waits_for_it(
    tower_harness: TowerHarness,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: int) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    tower_harness.before_call = wait
    tower_harness.encode(1, time=20)
    tower_harness.thread.start()
    assert begun.wait(PATIENCE_S)
    tower_harness.encode(3)
    tower_harness.work.post(DropWork([1, 3]))
    # Both have been read by then.
    assert tower_harness.hear() == (3, "cancelled")
    tower_harness.encode(2)
    go_on.set()
    assert [tower_harness.hear(), tower_harness.hear()] == [(1, "cancelled"), (2, "")]
    assert tower_harness.engine.calls == [32, 16]


def test_mail_is_read_while_the_tower_is_at_a_call(tower_harness: TowerHarness) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: int) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    tower_harness.before_call = wait
    tower_harness.encode(1)
    tower_harness.thread.start()
    assert begun.wait(PATIENCE_S)
    while next_mail(tower_harness.supervisor, 0) is not None:
        pass
    tower_harness.encode(2)
    tower_harness.work.post(DropWork([2]))
    assert tower_harness.hear() == (2, "cancelled")
    assert next_mail(tower_harness.supervisor, PATIENCE_S) is not None
    go_on.set()
    assert tower_harness.hear() == (1, "")


def test_a_call_that_does_not_end_shows_no_progress(
    tower_harness: TowerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "CALL_S", -1.0)
    monkeypatch.setattr(encoder, "PROGRESS_S", 0.01)
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: int) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    tower_harness.before_call = wait
    tower_harness.encode(1)
    tower_harness.thread.start()
    assert begun.wait(PATIENCE_S)
    while next_mail(tower_harness.supervisor, 0) is not None:
        pass
    assert next_mail(tower_harness.supervisor, 0.2) is None
    go_on.set()
    assert tower_harness.hear() == (1, "")
    assert next_mail(tower_harness.supervisor, PATIENCE_S) is not None


def test_an_encoder_without_its_process_ends_also_in_a_call(
    tower_harness: TowerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = threading.Event()

    def poll() -> None:
        raised.set()
        raise HearthError("encoder_failed", "as asked")

    def wait(_: int) -> None:
        monkeypatch.setattr(tower_harness.actor._decoder, "poll", poll)
        assert raised.wait(PATIENCE_S)

    tower_harness.before_call = wait
    tower_harness.encode(1)
    tower_harness.thread.start()
    tower_harness.thread.join(PATIENCE_S)
    assert tower_harness.failure is not None
    assert tower_harness.failure.message == "as asked"


def test_what_is_dropped_while_it_is_decoded_sees_no_tower(tower_harness: TowerHarness) -> None:
    # The process has two pictures at once.
    tower_harness.actor._decoder.wait_ready()
    for number in (1, 2, 3):
        tower_harness.encode(number)
    tower_harness.work.post(DropWork([1, 2, 3, 4]))
    tower_harness.thread.start()
    assert sorted(tower_harness.hear() for _ in range(3)) == [(n, "cancelled") for n in (1, 2, 3)]
    assert tower_harness.engine.calls == []


def test_no_tokenizer_is_loaded_beside_the_encoder() -> None:
    program = "import sys, hearth.actors.encoder.actor; print('tokenizers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"False\n"
