from __future__ import annotations

import os
import threading
from collections.abc import Iterator
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
from hearth.actors.host import run_actor
from hearth.actors.mailbox import Receiver, Sender, ZmqContext
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
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.export.options import ExportOptions
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.image_processing.patches import patch
from hearth.runtime.image_processing.sizes import layout_of, video_layout
from hearth.runtime.images import FileFormat, Picture, Slot
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.vision_config import VISION_FOLDER, load_vision_config
from tests.actors.mail import next_mail
from tests.runtime.image_processing.photographs import draw, file_of
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


class House:
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
def house(short_folder: Path, engine: Path, request: pytest.FixtureRequest) -> Iterator[House]:
    context: ZmqContext = zmq.Context()
    made = House(short_folder, engine, context, **getattr(request, "param", {}))
    yield made
    made.close()
    context.term()


def test_pictures_of_several_requests_get_their_embeddings(house: House) -> None:
    raw = draw(40, 56)
    raw_input = ImageInput(Picture("rgb8", 40, 56, 120), house.put(raw.tobytes()))
    works = [
        house.encode(1, house.photo((96, 64))),
        house.encode(2, raw_input),
        house.encode(3, house.photo((64, 64)), house.photo((64, 64)), house.photo((64, 64))),
    ]
    house.post(*works)
    house.thread.start()
    life = [next_mail(house.supervisor, PATIENCE_S) for _ in range(3)]
    assert [type(one) for one in life] == [ActorHello, ActorReady, ActorProgress]
    words = house.heard(3)
    pixels = [[draw(96, 64)], [raw], [draw(64, 64)] * 3]
    for work, frames in zip(works, pixels, strict=True):
        word = words[work.number]
        assert isinstance(word, Encoded)
        assert min(word.times.decode_s, word.times.resize_s, word.times.engine_s) > 0
        expected = house.expected(work, *frames)
        np.testing.assert_allclose(house.embedded(work), expected, atol=1e-5)


def test_what_is_no_picture_fails_alone(house: House) -> None:
    good = house.photo((64, 64))
    cut = ImageInput(Picture("jpeg", 64, 64), house.put(file_of(draw(64, 64), "jpeg")[:700]))
    other = ImageInput(Picture("png", 640, 640), good.slot)
    gone = ImageInput(Picture("png", 64, 64), GONE)
    works = [house.encode(n, one) for n, one in enumerate((good, cut, other, gone, good), 1)]
    house.post(*works)
    house.thread.start()
    words = house.heard(5)
    codes = [getattr(words[number], "code", "") for number in range(1, 6)]
    assert codes == ["", "image_invalid", "image_invalid", "internal", ""]
    assert np.array_equal(house.embedded(works[0]), house.embedded(works[4]))


def test_memory_that_has_been_given_to_another_is_not_written(house: House) -> None:
    photo = house.photo((64, 64))
    work, other = house.encode(1, photo), house.encode(2, photo)
    house.post(msgspec.structs.replace(work, target=GONE), other)
    house.thread.start()
    words = house.heard(2)
    assert [type(words[1]), type(words[2])] == [EncodeFailed, Encoded]
    assert words[1].code == "internal"


def test_each_piece_of_work_is_answered_once_also_what_nobody_waits_for(house: House) -> None:
    photo = house.photo((64, 64))
    house.post(*(house.encode(number, photo) for number in (1, 2, 3)), DropWork([2, 7]))
    house.thread.start()
    words = house.heard(3)
    assert sorted(words) == [1, 2, 3]
    assert getattr(words[2], "code", "cancelled") == "cancelled"


@pytest.mark.parametrize("house", [{"device": "cuda"}], indirect=True)
def test_where_an_executor_has_the_tower_patches_are_all(house: House) -> None:
    work = house.encode(1, house.photo((96, 64)))
    house.post(work)
    house.thread.start()
    assert isinstance(house.heard(1)[1], Patched)
    layout, config = work.work.layout, house.config
    shape, patches = (layout.patches, config.patch_bytes), np.dtype(np.uint8)
    expected = np.empty(shape, np.uint8)
    patch(Image.fromarray(draw(96, 64)), layout, config, expected)
    assert np.array_equal(house.arenas[1].array(work.patches, shape, patches), expected)
