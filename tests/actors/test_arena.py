from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from msgspec import structs

from hearth.actors.arena import HEAD_BYTES, Arena, ArenaSlots, slot_bytes
from hearth.actors.executor.open import ArenaEmbeddings
from hearth.runtime.config import DType
from hearth.runtime.errors import HearthError
from hearth.runtime.images import EmbeddedImage, Slot
from hearth.runtime.tensors.tensor import numpy_dtype
from tests.runtime.engine_configs import small_config


def test_what_one_process_writes_another_reads() -> None:
    arena = Arena.create("test", 4096)
    slot = arena.slots().take(5)
    assert slot is not None
    arena.view(slot)[:] = b"hello"
    program = (
        "from hearth.actors.arena import Arena; from hearth.runtime.images import Slot; "
        f"print(bytes(Arena.open({arena.descriptor}, 4096).view({slot!r})).decode())"
    )
    told = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        pass_fds=[arena.descriptor],
    )
    assert told.stdout == "hello\n"
    arena.close()


def test_a_slot_that_was_freed_is_noticed_before_and_behind_reading() -> None:
    arena = Arena.create("test", 4096)
    slots = arena.slots()
    slot = slots.take(100)
    assert slot is not None
    arena.view(slot)
    slots.free(slot)
    for look in (arena.check, arena.view):
        with pytest.raises(HearthError) as caught:
            look(slot)
        assert caught.value.code == "internal"
    again = slots.take(100)
    assert again is not None
    assert again.offset == slot.offset
    arena.check(again)
    with pytest.raises(HearthError, match="given to another"):
        arena.check(slot)
    arena.close()


@pytest.mark.parametrize(
    "slot",
    [Slot(-64, 8, 0), Slot(4096, 8, 0), Slot(0, 4096, 0), Slot(1 << 40, 1, 1), Slot(0, -1, 0)],
)
def test_a_slot_outside_is_refused(slot: Slot) -> None:
    arena = Arena.create("test", 4096)
    with pytest.raises(HearthError):
        arena.view(slot)
    arena.close()


def test_nobody_can_shorten_the_memory_under_the_others() -> None:
    arena = Arena.create("test", 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.descriptor, 0)
    arena.close()


def test_a_descriptor_that_is_no_arena_is_refused() -> None:
    arena = Arena.create("test", 4096)
    with pytest.raises(HearthError):
        Arena.open(arena.descriptor, 1 << 20)
    arena.close()
    with pytest.raises(HearthError):
        Arena.open(arena.descriptor, 4096)


def test_an_arena_closes_under_a_view() -> None:
    arena = Arena.create("test", 4096)
    slot = arena.slots().take(4)
    assert slot is not None
    view = arena.view(slot)
    arena.close()
    view[:] = b"kept"
    assert bytes(view) == b"kept"


def test_slots_do_not_overlap_and_what_is_freed_comes_back() -> None:
    chance = random.Random(7)
    slots = ArenaSlots(1 << 16)
    held: dict[int, Slot] = {}
    for _ in range(2000):
        if held and chance.random() < 0.5:
            slots.free(held.pop(chance.choice(list(held))))
        elif (slot := slots.take(chance.randrange(6000))) is not None:
            assert slot.generation not in held
            held[slot.generation] = slot
        ends = 0
        for slot in sorted(held.values(), key=lambda one: one.offset):
            assert slot.offset >= ends
            assert slot.offset % HEAD_BYTES == 0
            ends = slot.offset + HEAD_BYTES + slot.size
        assert ends <= 1 << 16
        assert len(slots) == len(held)
    for slot in held.values():
        slots.free(slot)
        slots.free(slot)
    assert slots.used == 0
    assert slots.take((1 << 16) - HEAD_BYTES) is not None


def test_a_slot_that_does_not_fit_now_may_fit_later() -> None:
    slots = ArenaSlots(1024)
    first = slots.take(500)
    assert first is not None
    assert slots.used == slot_bytes(500) == 64 + 512
    assert slots.take(500) is None
    slots.free(first)
    assert slots.take(1024 - HEAD_BYTES + 1) is None
    assert slots.take(1024 - HEAD_BYTES) is not None


TOKENS = 3


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embeddings_are_read_where_they_lie_in_the_engines_type(dtype: DType) -> None:
    config = structs.replace(small_config(), dtype=dtype, num_deepstack_features=2)
    arena = Arena.create("embeddings", 1 << 16)
    store, slots = ArenaEmbeddings(arena, config), arena.slots()
    shape = (3, TOKENS, config.hidden_size)
    written = np.arange(np.prod(shape)).reshape(shape).astype(numpy_dtype(dtype))
    slot = slots.take(written.nbytes)
    assert slot is not None
    arena.view(slot)[:] = written.tobytes()
    image = EmbeddedImage(slot, TOKENS, ())
    read = store.read(image)
    assert read.dtype == written.dtype
    assert np.array_equal(read, written)
    arena.view(slot)[0] ^= 1
    assert not np.array_equal(read, written), "it is a view"
    with pytest.raises(HearthError, match="bytes"):
        store.read(structs.replace(image, tokens=TOKENS + 1))
    slots.free(slot)
    with pytest.raises(HearthError) as caught:
        store.read(image)
    assert caught.value.code == "internal"
