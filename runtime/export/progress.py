"""Progress of an export."""

from collections.abc import Callable, Iterable, Iterator

from hearth.runtime.export.checkpoint import Array

Progress = Callable[[str, int, int], None]


class ProgressCounter:
    """Count the bytes of one stage and report them; `done` never exceeds `total`."""

    def __init__(self, progress: Progress | None, stage: str, total: int) -> None:
        self._progress = progress
        self._stage = stage
        self._total = total
        self._done = 0
        self.add(0)

    def add(self, count: int) -> None:
        """Count bytes that are now done."""
        self._done = min(self._done + count, self._total)
        if self._progress is not None:
            self._progress(self._stage, self._done, self._total)

    def finish(self) -> None:
        """Count all bytes that are left."""
        self.add(self._total)

    def over(self, pieces: Iterable[Array]) -> Iterator[Array]:
        """Yield `pieces`, each counted once the next is requested."""
        for piece in pieces:
            yield piece
            self.add(piece.nbytes)
