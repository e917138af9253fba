from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hearth.actors.messages import (
    DropWork,
    Embedded,
    Encode,
    Encoded,
    EncodeFailed,
    EncoderLost,
    EncoderReady,
    ImageTimes,
    Patched,
    RunVisionEncoder,
    Schedule,
)
from hearth.actors.scheduler.encoder_scheduler import IN_FLIGHT
from hearth.actors.scheduler.policy import Decision, SchedulerPolicy
from hearth.actors.settings import PolicySettings
from tests.actors.scheduler.images import arenas
from tests.actors.scheduler.simulation import Simulation

BROKEN = "broken"
"""In the name of a picture that cannot be decoded."""


class ImageSimulation(Simulation):
    """An encoder does one piece of work after another; on a GPU the executor runs the tower."""

    def __init__(
        self,
        settings: PolicySettings,
        *,
        encode_s: float,
        gpu: bool,
        patches: int,
        embeddings: int,
        broken: frozenset[bytes],
        **more: Any,
    ) -> None:
        super().__init__(settings, **more)
        self.arenas = arenas(patches=patches, embeddings=embeddings)
        self.policy = SchedulerPolicy(settings, self.arenas)
        self.embedded: list[int] = []
        self._encode_s, self._gpu, self._broken = encode_s, gpu, broken
        self._encoder = 0
        self._under_way: dict[int, Encode] = {}
        self._dropped: set[int] = set()
        self._busy = False
        # What somebody may write to, and who has died or runs the tower meanwhile.
        self._written: set[tuple[str, int]] = set()
        self._dead: list[Encode] = []
        self._patched: dict[int, Encode] = {}
        self._towers: dict[int, Encode] = {}

    def encoder_ready(self, when: float) -> None:
        def action() -> None:
            self._encoder += 1
            self._busy = False
            # Only now is it certain that the one before writes no more.
            self._give_back([*self._dead, *self._under_way.values()])
            self._dead = []
            self._under_way.clear()
            self._apply(self.policy.update_images(EncoderReady("w"), self.now))

        self.at(when, action)

    def lose_encoder(self, when: float, ready_again: float) -> None:
        def action() -> None:
            self._encoder += 1
            self._dead += self._under_way.values()
            self._under_way.clear()
            self._apply(self.policy.update_images(EncoderLost("killed"), self.now))

        self.at(when, action)
        self.encoder_ready(ready_again)

    def make_ready(self) -> None:
        # So with executors and what their towers were at.
        self._give_back(self._towers.values())
        self._towers.clear()
        super().make_ready()

    def _apply(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Encode():
                    self._write(decision)
                    self._under_way[decision.number] = decision
                    assert len(self._under_way) <= IN_FLIGHT
                    self._work()
                case DropWork(numbers):
                    self._dropped.update(numbers)
                case RunVisionEncoder(number):
                    self._run_tower(number)
                case Embedded(rid):
                    assert rid not in self.embedded, "it is told once"
                    self.embedded.append(rid)
                case _:
                    super()._apply([decision])

    def _mail(self, message: Any) -> None:
        if isinstance(message, Schedule):
            for rid, row in message.new.items():
                assert not row.images or rid in self.embedded
        super()._mail(message)

    def _write(self, work: Encode) -> None:
        places = _places(work)
        assert not places & self._written, "two write to one place"
        self._written |= places

    def _give_back(self, works: Iterable[Encode]) -> None:
        for work in works:
            self._written -= _places(work)

    def _work(self) -> None:
        if self._busy or not self._under_way:
            return
        self._busy = True
        work = next(iter(self._under_way.values()))
        self._soon(lambda: self._done(work))

    def _soon(self, action: Callable[[], None]) -> None:
        encoder = self._encoder
        self.at(self.now + self._encode_s, lambda: action() if encoder == self._encoder else None)

    def _done(self, work: Encode) -> None:
        self._busy = False
        del self._under_way[work.number]
        told: Any = Encoded(work.number, ImageTimes(engine_s=self._encode_s))
        if work.work.key in self._broken:
            told = EncodeFailed(work.number, "image_invalid", "it is broken")
        elif work.number in self._dropped:
            told = EncodeFailed(work.number, "cancelled", "nobody waits for it any more")
        elif self._gpu:
            told = Patched(work.number, ImageTimes())
        self._patched[work.number] = work
        self._give_back([work])
        self._apply(self.policy.update_images(told, self.now))
        self._work()

    def _run_tower(self, number: int) -> None:
        executor = self.executor
        if executor is None:
            # Its death is not known yet: what is sent meanwhile is lost with it.
            assert self._lag_s, "nothing is sent to a dead executor"
            return
        self._towers[number] = work = self._patched.pop(number)
        self._write(work)

        def action() -> None:
            if executor is self.executor:
                self._give_back([self._towers.pop(number)])
                told = Encoded(number, ImageTimes(engine_s=self._encode_s))
                self._apply(self.policy.update_images(told, self.now))

        self.at(self.now + self._encode_s, action)


def _places(work: Encode) -> set[tuple[str, int]]:
    slots = {"patches": work.patches, "embeddings": work.target}
    return {
        (name, place)
        for name, slot in slots.items()
        for place in range(slot.offset, slot.offset + slot.size, 64)
    }
