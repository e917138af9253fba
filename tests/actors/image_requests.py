"""Requests with images, and the memory that these take."""

from __future__ import annotations

import hashlib

from hearth.actors.arena import ArenaSlots, slot_bytes
from hearth.actors.messages import ImageInput, ImageWork, PromptImage, Request, Visual
from hearth.actors.scheduler.encoder_scheduler import ImageArenas
from hearth.runtime.images import ImageLayout, ImageSpan, Picture, Slot
from hearth.runtime.request import RequestOptions

TOKENS, PATCHES = 4, 16
TOKEN_BYTES, PATCH_BYTES = 64, 48
SIZE = (64, 64)
LAYOUT = ImageLayout(*SIZE, (1, 4, 4), TOKENS)


def arenas(*, patches: int = 100, embeddings: int = 100) -> ImageArenas:
    """With room for the patches and embeddings of so many images."""
    return ImageArenas(
        patches=ArenaSlots(patches * slot_bytes(PATCHES * PATCH_BYTES)),
        embeddings=ArenaSlots(embeddings * slot_bytes(TOKENS * TOKEN_BYTES)),
        patch_bytes=PATCH_BYTES,
        token_bytes=TOKEN_BYTES,
    )


def work(name: str, sender: int = 0, layout: ImageLayout = LAYOUT) -> ImageWork:
    """The picture `name`, as the request `sender` has sent it."""
    sent = ImageInput(Picture("rgb8", 64, 64, 192), Slot(0, 12288, sender))
    return ImageWork(hashlib.sha256(name.encode()).digest(), Visual([sent]), layout)


def submit_images(
    rid: int,
    *names: str,
    client: int | None = None,
    priority: int = 0,
    deadline: float | None = None,
    layout: ImageLayout = LAYOUT,
) -> Request:
    """A request of a word before and one behind each of its images, by a client of its own."""
    images = [
        PromptImage(work(name, rid, layout), (ImageSpan(1 + place * (TOKENS + 1), TOKENS),))
        for place, name in enumerate(names)
    ]
    number = rid if client is None else client
    options, ids = RequestOptions(max_tokens=8), [1] * (1 + len(names) * (TOKENS + 1))
    return Request(rid, options, priority, deadline, number, token_ids=ids, images=images)
