"""A policy between an executor and an encoder that are played, for tests of images."""

from __future__ import annotations

from typing import Any

from hearth.actors.messages import (
    Encode,
    Encoded,
    EncoderReady,
    ExecutorLimits,
    Failed,
    ImageTimes,
    Request,
    Schedule,
)
from hearth.actors.scheduler.encoder_scheduler import ImageArenas
from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.actors.settings import PolicySettings
from tests.actors.image_requests import arenas
from tests.actors.simulation import output, ready

SETTINGS = PolicySettings(fill_wait_ms=0.0, ageing_s=1.0)
LIMITS = ExecutorLimits(max_batch=2, max_prompt_tokens=100, max_total_tokens=200)
TIMES = ImageTimes(0.1, 0.2, 0.4)


class House:
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
        self.does(self.policy.images_told(message, self.now))

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
