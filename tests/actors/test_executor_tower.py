"""Pictures that an executor's vision tower encodes, beside rows and without."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.actors.arena import Arena, ArenaSlots
from hearth.actors.executor.vision_encoder_memory import VisionEncoderMemory
from hearth.actors.messages import Encoded, EncodeFailed, ImageTimes, RunVisionEncoder
from hearth.runtime.errors import HearthError
from hearth.runtime.images import ImageLayout, Slot
from hearth.runtime.request import RequestOptions, RowRequest
from tests.actors.executor_house import open_house
from tests.actors.fake_runtime import FakeRuntime
from tests.runtime.vision.tower_config import config_of

CONFIG = config_of("qwen3_vl", position_side=4, patch_size=2, deepstack_layers=(0,))
LAYOUT = ImageLayout(8, 8, (1, 4, 4), 4)
OUTPUTS = (2, 4, CONFIG.output_size)
GONE = Slot(0, 64, 999)


Arenas = tuple[VisionEncoderMemory, ArenaSlots, ArenaSlots]


@pytest.fixture
def memory() -> Iterator[Arenas]:
    patches, embeddings = (Arena.create(name, 1 << 16) for name in ("patches", "embeddings"))
    yield VisionEncoderMemory(CONFIG, patches, embeddings), patches.slots(), embeddings.slots()
    patches.close()
    embeddings.close()


def run_tower(memory: Arenas, number: int, level: int = 1) -> RunVisionEncoder:
    arenas, patches, embeddings = memory
    given, target = patches.take(16 * CONFIG.patch_bytes), embeddings.take(4 * prod(OUTPUTS))
    assert given is not None
    assert target is not None
    arenas.patches.view(given)[:] = bytes([level]) * given.size
    return RunVisionEncoder(number, LAYOUT, given, target)


def embedded(memory: Arenas, sent: RunVisionEncoder) -> NDArray[Any]:
    return memory[0].embeddings.array(sent.target, OUTPUTS, np.dtype(np.float32))


def test_embeddings_come_beside_rows_and_are_told_once(memory: Arenas) -> None:
    with open_house(FakeRuntime(), memory[0]) as house:
        first, second = run_tower(memory, 7), run_tower(memory, 8)
        options = RequestOptions(max_tokens=3)
        house.offer((1, RowRequest(token_ids=[1], prompt_length=1, options=options)))
        house.work.post(first)
        house.work.post(second)
        house.start()
        house.hear_until("images", 2)
        house.finish(1)
        assert house.images == [Encoded(number, ImageTimes(engine_s=0.25)) for number in (7, 8)]
        assert (embedded(memory, first) == 7).all()
        assert (embedded(memory, second) == 8).all()


def test_a_picture_fails_alone(memory: Arenas) -> None:
    with open_house(FakeRuntime(), memory[0]) as house:
        house.work.post(run_tower(memory, 1, level=0))
        gone = run_tower(memory, 2)
        house.work.post(RunVisionEncoder(2, LAYOUT, gone.patches, GONE))
        house.work.post(
            RunVisionEncoder(3, ImageLayout(8, 8, (1, 2, 4), 2), gone.patches, gone.target)
        )
        house.work.post(run_tower(memory, 4))
        house.start()
        house.hear_until("images", 4)
        failed = {one.number: one.code for one in house.images if isinstance(one, EncodeFailed)}
        assert failed == {1: "non_finite", 2: "internal", 3: "internal"}


def test_what_is_given_to_another_meanwhile_is_told_as_failed(memory: Arenas) -> None:
    runtime = FakeRuntime()
    with open_house(runtime, memory[0]) as house:
        sent = run_tower(memory, 1)
        runtime.before_step = lambda _: memory[2].free(sent.target)
        house.work.post(sent)
        house.start()
        assert house.hear_until("images").code == "internal"


def test_a_step_that_fails_takes_the_pictures_along(memory: Arenas) -> None:
    runtime = FakeRuntime()

    def fail(step: int) -> None:
        if step == 1:
            runtime.pictures.clear()
            raise HearthError("executor_failed", "as asked")

    runtime.before_step = fail
    with open_house(runtime, memory[0]) as house:
        house.work.post(run_tower(memory, 1))
        house.work.post(run_tower(memory, 2))
        house.start()
        house.hear_until("images", 2)
        told = [(one.number, getattr(one, "code", "")) for one in house.images]
        assert told == [(1, "executor_failed"), (2, "executor_failed")]
        house.work.post(run_tower(memory, 3))
        assert house.hear_until("images", 3) == Encoded(3, ImageTimes(engine_s=0.25))


def test_an_executor_without_a_tower_refuses() -> None:
    with open_house(FakeRuntime()) as house:
        house.work.post(RunVisionEncoder(1, LAYOUT, GONE, GONE))
        house.start()
        assert house.hear_until("images").code == "internal"
