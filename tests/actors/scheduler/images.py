from __future__ import annotations

import hashlib
from typing import Any

from hearth.actors.arena import ArenaSlots, slot_bytes
from hearth.actors.messages import (
    Encode,
    Encoded,
    EncoderReady,
    ExecutorLimits,
    Failed,
    ImageInput,
    ImageTimes,
    ImageWork,
    PromptImage,
    Request,
    Schedule,
    Visual,
)
from hearth.actors.scheduler.encoder_scheduler import ImageArenas
from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.actors.settings import PolicySettings
from hearth.runtime.images import ImageLayout, ImageSpan, Picture, Slot
from hearth.runtime.request import RequestOptions
from tests.actors.scheduler.simulation import output, ready

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


SETTINGS = PolicySettings(fill_wait_ms=0.0, ageing_s=1.0)
LIMITS = ExecutorLimits(max_batch=2, max_prompt_tokens=100, max_total_tokens=200)
TIMES = ImageTimes(0.1, 0.2, 0.4)


class Harness:
    """A policy with an executor and an encoder that are played; `sent` is what it says, by kind."""

    def __init__(self, images: ImageArenas | None = None, *, encoder: bool = True) -> None:
        self.policy = SchedulerPolicy(SETTINGS, images or arenas())
        self.now, self.sent = 0.0, list[Any]()
        self.does(self.policy.executor_ready(ready(LIMITS), 0.0))
        if encoder:
            self.hear(EncoderReady("w"))

    def does(self, decisions: list[Any]) -> None:
        self.now += 0.01
        self.sent += [*decisions, *self.policy.tick(self.now)]

    def submit(self, *messages: Request) -> None:
        for message in messages:
            self.does(self.policy.submit(message, self.now))

    def hear(self, message: Any) -> None:
        self.does(self.policy.update_images(message, self.now))

    def encode(self, number: int) -> None:
        self.hear(Encoded(number, TIMES))

    def cancel(self, rid: int) -> None:
        self.policy.cancel(rid)
        self.does([])

    def tell(self, **changes: Any) -> None:
        """Have the executor tell this of its rows."""
        self.does(self.policy.update(output(**changes), self.now))

    def end(self, rid: int) -> None:
        self.policy.update(output(placed=[rid]), self.now)
        self.tell(finished=[rid])

    def take(self, kind: type[Any]) -> list[Any]:
        """What has been sent of one kind since."""
        taken = [one for one in self.sent if isinstance(one, kind)]
        self.sent = [one for one in self.sent if not isinstance(one, kind)]
        return taken

    def offered(self) -> dict[int, Any]:
        return {rid: row for one in self.take(Schedule) for rid, row in one.new.items()}

    def senders(self) -> list[int]:
        """Who sent the pictures that the encoder has been given since."""
        return [one.work.visual.frames[0].slot.generation for one in self.take(Encode)]

    def failed(self) -> list[tuple[list[int], str, str | None]]:
        return [(one.rids, one.code, one.field) for one in self.take(Failed)]
