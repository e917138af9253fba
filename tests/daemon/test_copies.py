"""That bytes of a picture, and embeddings, are copied once each behind the socket."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from hearth.actors.arena import Arena
from hearth.actors.executor.open import ArenaEmbeddings
from hearth.actors.messages import (
    Encode,
    Encoded,
    EncoderReady,
    ImageTimes,
    Request,
    Schedule,
    Visual,
)
from hearth.actors.scheduler.encoder_scheduler import ImageArenas
from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.actors.settings import PolicySettings
from hearth.daemon.door.pictures import Pictures, VisualPart
from hearth.runtime.text.conversation import Conversation
from hearth_client import protocol
from tests.actors.scheduler.simulation import LIMITS, ready
from tests.actors.tokenizer.vision_inputs import IMAGE, VisionInputs, turn
from tests.runtime.engine_configs import small_config

SIDE = 2048
FRAME_BYTES = 3 * SIDE**2
LITTLE = 1 << 20
"""Bytes: far less than the frame has, and than its embeddings have."""


@contextmanager
def no_copy() -> Iterator[None]:
    """Whoever copies a frame or embeddings inside needs memory for it."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < LITTLE
    finally:
        tracemalloc.stop()


def taken(pictures: Pictures, shown: list[VisualPart], frame: bytes) -> list[Visual]:
    """As the front door takes one."""
    views = [memoryview(frame)]
    filling = pictures.fill(shown, views, pictures.reserve(views, 0, 0.75), len(frame))
    with pytest.raises(StopIteration) as done:
        next(filling)
    visuals: list[Visual] = done.value.value
    return visuals


def size(message: Any) -> int:
    return len(msgspec.msgpack.encode(message))


def test_a_picture_is_copied_once_and_its_embeddings_are_read_where_they_were_written(
    tmp_path: Path,
) -> None:
    frame = bytes(range(256)) * (FRAME_BYTES // 256)
    inputs = VisionInputs(tmp_path, room=2 * FRAME_BYTES)
    embeddings, patches = Arena.create("embeddings", 1 << 26), Arena.create("patches", 1 << 25)
    config = structs.replace(small_config(), hidden_size=1024, num_deepstack_features=3)
    store = ArenaEmbeddings(embeddings, config)
    policy = SchedulerPolicy(
        PolicySettings(fill_wait_ms=0.0, queue_tokens=1 << 20),
        ImageArenas(patches.slots(), embeddings.slots(), inputs.config.patch_bytes, 4 * 4 * 1024),
    )
    limits = structs.replace(LIMITS, max_prompt_tokens=1 << 16, max_total_tokens=1 << 17)
    policy.executor_ready(ready(limits), 0.0)
    policy.update_images(EncoderReady("w"), 0.0)
    part = protocol.ImagePart(frame=1, encoding="rgb8", width=SIDE, height=SIDE)

    with no_copy():
        # The one copy: into memory that was there before.
        visuals = taken(Pictures(inputs.arena), [("messages[0].content[0]", part)], frame)
        chat = Conversation([turn(IMAGE)])
        asked = Request(1, chat=chat, visuals=visuals)
        prompt = inputs.images.encode(chat, visuals)
        works = inputs.images.works(prompt, visuals)
        policy.submit(Request(1, token_ids=prompt.encoded.ids, images=works), 0.0)
        (work,) = [one for one in policy.tick(0.0) if isinstance(one, Encode)]
    assert bytes(inputs.arena.view(work.work.visual.frames[0].slot)) == frame
    shape = (4, work.work.layout.tokens, 1024)
    written = embeddings.array(work.target, shape, np.dtype(np.float32))
    assert written.nbytes > LITTLE
    with no_copy():
        # Here the tower writes.
        written[:] = 7.0
        policy.update_images(Encoded(work.number, ImageTimes()), 0.0)
        (wanted,) = [one for one in policy.tick(0.0) if isinstance(one, Schedule)]
        read = store.read(wanted.new[1].images[0])
    assert np.shares_memory(read, written)
    assert (read == 7.0).all()
    # Behind what ids the prompt has, no message is longer for the picture's bytes.
    ids = size(prompt.encoded.ids)
    assert max(size(asked), size(work), size(works), size(wanted) - ids) < 1000
