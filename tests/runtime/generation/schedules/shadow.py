"""A pure model of the batch: follows every reorder and step, and checks each of them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import RowRequest
from tests.runtime.generation.schedules.trial import ViolationError


class Place(msgspec.Struct):
    """A row at its place, and how many of its tokens the cache holds."""

    request: RowRequest
    filled: int = 0

    @property
    def left(self) -> int:
        """Tokens of the prompt that are still to be prefilled."""
        return max(0, len(self.request.token_ids) - self.filled)


class Shadow:
    """A row owner beside the others; `chunk` and `capacity` are those of the engine.

    A chunk is as wide as its longest piece, or padded to one of `widths`.
    """

    def __init__(self, places: int, chunk: int, capacity: int, widths: Sequence[int] = ()) -> None:
        self.rows: list[Place] = []
        self._places = places
        self._chunk = chunk
        self._capacity = capacity
        self._widths = widths
        self._last = ""

    @property
    def decoding(self) -> int:
        """How many rows decode."""
        return sum(not row.left for row in self.rows)

    def reorder(self, reorder: BatchReorder) -> None:
        """Move and seat rows; each target must be free by its turn."""
        places = dict(enumerate(self.rows))
        gone = set(places) - {source for source, _, _ in reorder.moves}
        moved = set[int]()
        for source, target, used in reorder.moves:
            check(source in places and source not in moved, "no row to move: {}", reorder)
            check(target not in places or target in gone, "{} is taken: {}", target, reorder)
            check(used == places[source].filled, "{} slots are kept of {}", used, places[source])
            places[target] = places.pop(source)
            gone.discard(target)
            moved.add(target)
        for place, request, filled, _ in reorder.assignments:
            check(place not in moved, "{} is given twice: {}", place, reorder)
            places[place] = Place(request, filled)
            moved.add(place)
        check(set(range(reorder.rows)) <= set(places), "a place is empty: {}", reorder)
        check(moved <= set(range(reorder.rows)), "a place is none: {}", reorder)
        check(reorder.rows <= self._places, "too many rows: {}", reorder)
        self.rows = [places[place] for place in range(reorder.rows)]
        left = [row.left for row in self.rows]
        check(left == sorted(left), "the prompts left are {}", left)

    def prefill(self, token_ids: NDArray[np.int64], lengths: Sequence[int], first: int) -> None:
        """A chunk of the first joiners."""
        rows, width = token_ids.shape
        chunk = self.rows[first : first + rows]
        check(first == self.decoding, "{} rows decode, a chunk begins at {}", self.decoding, first)
        check(len(chunk) == len(lengths) == rows, "a chunk of {} rows", rows)
        check(max(lengths) <= width <= self._chunk, "a chunk of {} tokens: {}", width, lengths)
        padded = width == max(lengths) or width in self._widths
        check(padded, "{} padded to {}", lengths, width)
        check(not first or self._last != "prefill", "two chunks while rows wait")
        self._last = "prefill" if first else ""
        for row, length, tokens in zip(chunk, lengths, token_ids, strict=True):
            check(0 < length <= row.left, "{} tokens of {}", length, row)
            check(row.filled + width <= self._capacity, "a chunk of {} behind {}", width, row)
            wanted = row.request.token_ids[row.filled : row.filled + length]
            check(tokens[:length].tolist() == wanted, "{} are not the next of {}", tokens, row)
            row.filled += length

    def decode(self, rows: int) -> None:
        """A decode step of the first rows."""
        self._step(rows)
        for row in self.rows[:rows]:
            row.filled += 1

    def verify(self, rows: int, width: int) -> None:
        """A round; how much of it is kept is told behind it."""
        self._step(rows)
        for row in self.rows[:rows]:
            check(row.filled + width <= self._capacity, "a tree of {} behind {}", width, row)

    def kept(self, counts: Sequence[int]) -> None:
        """How many nodes of its tree each decoding row keeps."""
        for row, count in zip(self.rows, counts, strict=False):
            row.filled += count

    def _step(self, rows: int) -> None:
        check(rows == self.decoding, "{} rows decode, not {}", self.decoding, rows)
        joiners = len(self.rows) > rows
        check(not joiners or self._last != "decode", "two decode steps while joiners wait")
        self._last = "decode" if joiners else ""


def check(promise: object, broken: str, *seen: object) -> None:
    """Raise `ViolationError` for a promise that was not kept; `seen` fills the gaps of `broken`.

    Text is made only then: it would take longer than a step.
    """
    if not promise:
        raise ViolationError(broken.format(*seen))


@contextmanager
def watching(runtime: LLMInferenceRuntime, shadow: Shadow) -> Iterator[None]:
    """Let a shadow see every reorder, and every step before it runs."""
    runner, context = runtime._runner, runtime._context
    prefill, decode = runner.execute_prefill_step, runner.execute_vanilla_decoding_step
    verify, commit = runner.execute_eagle_base_tree_decoding_step, runner.commit_path

    def prefilling(token_ids: Any, lengths: Any, first: int = 0, images: Any = ()) -> Any:
        shadow.prefill(token_ids, lengths, first)
        return prefill(token_ids, lengths, first, images)

    def decoding(rows: int) -> Any:
        shadow.decode(rows)
        return decode(rows)

    def verifying(rows: int, width: int) -> Any:
        shadow.verify(rows, width)
        return verify(rows, width)

    def committing(nodes: Any) -> Any:
        shadow.kept([len(path) for path in nodes])
        return commit(nodes)

    with ExitStack() as patches:
        for name, seen in (
            ("execute_prefill_step", prefilling),
            ("execute_vanilla_decoding_step", decoding),
            ("execute_eagle_base_tree_decoding_step", verifying),
            ("commit_path", committing),
        ):
            patches.enter_context(patch.object(runner, name, seen))
        patches.enter_context(patch.object(context, "owners", [*context.owners, shadow]))
        yield
