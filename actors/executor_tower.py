"""The pictures that an executor's vision tower is at."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hearth.actors.encoder_messages import Encoded, EncodeFailed, RunTower
from hearth.actors.image_work import ImageTimes
from hearth.actors.tower_memory import TowerMemory
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.tower_turns import TowerResult, TowerWork


class ExecutorTower:
    """Turns slots of shared memory into work for a runtime, and its results into words.

    Without memory there is no tower, and all work is refused. Every piece of work is answered once.
    """

    def __init__(self, memory: TowerMemory | None = None) -> None:
        self._given = memory
        self._open: dict[int, RunTower] = {}

    def begin(self, message: RunTower, run: Callable[[TowerWork], None]) -> None:
        """Let the runtime `run` it; raises what that does, `internal` where memory is another's."""
        arrays = self._memory.arrays(message.layout, message.patches, message.target)
        run(TowerWork(message.number, message.layout, *arrays))
        self._open[message.number] = message

    def ended(self, results: Iterable[TowerResult]) -> list[Encoded | EncodeFailed]:
        """What is to be said of pictures that the runtime is done with."""
        told: list[Encoded | EncodeFailed] = []
        for number, engine_s, error in results:
            message = self._open[number]
            try:
                if error is not None:
                    raise error
                self._memory.check(message.patches, message.target)
            except HearthError as failure:
                told += self.failed([number], failure)
            else:
                del self._open[number]
                told.append(Encoded(number, ImageTimes(engine_s=engine_s)))
        return told

    def failed(self, numbers: Iterable[int], error: HearthError) -> list[EncodeFailed]:
        """What is to be said of these, which have no embeddings."""
        return [
            EncodeFailed(number, error.code, error.message)
            for number in numbers
            if self._open.pop(number, None) is not None
        ]

    @property
    def _memory(self) -> TowerMemory:
        if self._given is None:
            raise HearthError("internal", "this executor has no vision tower")
        return self._given

    @property
    def numbers(self) -> list[int]:
        """Pictures that are not answered for yet."""
        return list(self._open)
