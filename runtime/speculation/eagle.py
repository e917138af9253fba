from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from hearth.runtime.batch import BatchReorder, DecodingRow, DirtySlots
from hearth.runtime.device.device import PendingPaths, TreeBuffers
from hearth.runtime.executor.engine import GraphCounters
from hearth.runtime.options import EagleDraftingConfig
from hearth.runtime.runner.image_merge import image_pieces
from hearth.runtime.runner.pipeline_io import PipelineIO
from hearth.runtime.speculation.draft_runner import DraftEntries, EagleDraftRunner, NewestEntries

_MISSES = 8
"""Rounds in a row without an accepted token after which a draft's cache is looked at."""


class EagleProposer:
    """Trees of an EAGLE-3 draft engine.

    The draft's cache has an entry for each token but the first. The newest entries wait until a
    round begins, each with the place of its hidden state in the base's output. An entry whose
    hidden state a later step of the same row overwrites meanwhile is left out.
    """

    def __init__(
        self, draft: EagleDraftRunner, io: PipelineIO, drafting: EagleDraftingConfig
    ) -> None:
        self._draft = draft
        (self._hidden,), (self._prompt,) = io.step.hidden, io.prompt.hidden
        self._tail = range(io.waiting, io.waiting + draft.caches.lengths.shape[0])
        self._width, self._most = drafting.tree_size, drafting.most_accepted
        self.room = drafting.room
        self._waiting: dict[DecodingRow, list[int]] = {}
        self._asked: Sequence[bool] = ()
        self._misses: dict[DecodingRow, int] = {}
        self._whole: dict[DecodingRow, int] = {}
        self._ahead: tuple[Sequence[DecodingRow], Sequence[bool]] | None = None

    def reorder(self, reorder: BatchReorder) -> None:
        """Let the draft's rows move; waiting hidden states stay where the step has written them.

        A place that gets another row is zeroed behind that row's entries, where proposals were.
        """
        self._ahead = None
        self._whole = {row: count for row, count in self._whole.items() if row.runs_on}
        self._misses = {row: count for row, count in self._misses.items() if row.runs_on}
        caches = self._draft.caches
        lengths = {move.target: caches.row_lengths[move.source] for move in reorder.moves}
        lengths |= {place: 0 for place, _ in reorder.assignments}
        left = {move.source for move in reorder.moves} | lengths.keys()
        left |= set(range(reorder.rows, caches.batch))
        stale = [
            DirtySlots(place, lengths.get(place, 0), caches.kv.capacity) for place in sorted(left)
        ]
        caches.reorder(reorder._replace(stale=stale), attrgetter("drafted"))

    def prefilled(
        self, rows: Sequence[DecodingRow], lengths: Sequence[int], width: int, first: int
    ) -> None:
        """Append the chunk's entries; the entry of a row's last prompt token waits."""
        self._ahead = None
        for place, (row, added) in enumerate(zip(rows, lengths, strict=True)):
            if not row.prompt_left:
                self._save(row, place * width + added - 1)
        begins = [row.filled - added for row, added in zip(rows, lengths, strict=True)]
        counts = [
            min(added, len(row.initial) - 1 - begin)
            for row, added, begin in zip(rows, lengths, begins, strict=True)
        ]
        if not any(counts):
            # No step writes over what padded ones left behind these rows' entries.
            for place in range(first, first + len(rows)):
                self._draft.caches.zero_behind(place)
            return
        wide = self._draft.prompt_width(max(counts), max(begins))
        # Each entry is of the token behind its own.
        images = [row.request.images for row in rows]
        pieces = image_pieces(images, [begin + 1 for begin in begins], counts, wide)
        entries = _table(len(rows), wide, counts, begins)._replace(images=pieces)
        self._count_whole(rows, begins, counts)
        for place, (row, count, begin) in enumerate(zip(rows, counts, begins, strict=True)):
            entries.token_ids[place, :count] = row.initial[begin + 1 : begin + 1 + count]
            entries.hidden[place, :count] = place * width + np.arange(count)
        self._draft.execute_prefill_step(entries, self._prompt, first)

    def stepped(self, rows: Sequence[DecodingRow]) -> None:
        """Let the entries of the newest tokens wait; older waiting entries are lost."""
        self._ahead = None
        self._waiting = {row: [place] for place, row in enumerate(rows)}

    def ready(self, _rows: Sequence[DecodingRow], _speculating: Sequence[bool]) -> bool:
        """Every row that decodes has an entry waiting."""
        return True

    def propose(
        self, rows: Sequence[DecodingRow], speculating: Sequence[bool], _trees: TreeBuffers
    ) -> list[int]:
        """Append the waiting entries, grow the proposal, and plant its best nodes."""
        self._asked = speculating
        waiting = [self._waiting[row] for row in rows]
        counts = [len(places) for places in waiting]
        first = [row.filled - count for row, count in zip(rows, counts, strict=True)]
        self._count_whole(rows, first, counts)
        sizes = [self._width if wanted else 1 for wanted in speculating]
        ahead, self._ahead = self._ahead, None
        if ahead == (rows, speculating):
            self._draft.take_proposal(counts, speculating, self._width)
            return sizes
        batch, width = self._draft.accept_shape(len(rows), max(counts))
        tokens = [
            row.token_ids[len(row.token_ids) - count :] + [0] * (width - count)
            for row, count in zip(rows, counts, strict=True)
        ]
        hidden = [places + [-1] * (width - len(places)) for places in waiting]
        for _ in range(batch - len(rows)):
            counts.append(1)
            first.append(0)
            tokens.append([0] * width)
            hidden.append([-1] * width)
        entries = NewestEntries(tokens, counts, first, hidden)
        self._draft.propose(entries, self._hidden, speculating, self._width)
        return sizes

    def ahead(
        self,
        rows: Sequence[DecodingRow],
        speculating: Sequence[bool],
        paths: PendingPaths,
        width: int,
    ) -> None:
        """Queue the next proposal of these rows, for the case that all of them go on."""
        if not all(row.remaining_budget > self._most for row in rows):
            return
        if self._draft.propose_ahead(len(rows), paths, width):
            self._ahead = rows, speculating

    def accepted(
        self, rows: Sequence[DecodingRow], nodes: Sequence[Sequence[int]], width: int
    ) -> None:
        """Let the entries of the kept nodes wait."""
        self._waiting = {
            row: [place * width + node for node in path]
            for place, (row, path) in enumerate(zip(rows, nodes, strict=True))
        }
        for place, (row, path) in enumerate(zip(rows, nodes, strict=True)):
            if self._asked[place] and len(path) == 1:
                self._count_miss(place, row)
            else:
                self._misses.pop(row, None)

    def zero_row(self, place: int, row: DecodingRow) -> None:
        """Zero the draft's cache of a row."""
        self._ahead = None
        self._draft.caches.zero_row(place)
        self._whole[row] = -1

    def drafted(self, row: DecodingRow) -> int:
        """Number of entries from the first on without a gap."""
        return max(0, self._whole.get(row, row.drafted))

    def capture(self, batch_sizes: Sequence[int]) -> list[int]:
        """Capture both draft steps."""
        self._draft.capture_draft_proposal_graph(batch_sizes, self._hidden)
        return [self._width]

    @property
    def counters(self) -> GraphCounters:
        """Graph counters of the draft engine."""
        return self._draft.executor.counters

    def close(self) -> None:
        """Free the draft engine."""
        self._draft.close()

    def _count_whole(
        self, rows: Sequence[DecodingRow], first: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Count appended entries as whole, unless there is a gap before them."""
        for row, begin, count in zip(rows, first, counts, strict=True):
            whole = self._whole.get(row, row.drafted)
            self._whole[row] = begin + count if whole == begin else whole

    def _save(self, row: DecodingRow, place: int) -> None:
        """Copy a hidden state of the chunk to the places of waiting ones."""
        waiting = {one: places for one, places in self._waiting.items() if one.runs_on}
        taken = {place for places in waiting.values() for place in places}
        saved = next(place for place in self._tail if place not in taken)
        self._draft.save_hidden(self._prompt, [place], self._hidden, saved)
        self._waiting = {**waiting, row: [saved]}

    def _count_miss(self, place: int, row: DecodingRow) -> None:
        """Count a miss; after `_MISSES` in a row, zero the row's draft cache if it is not finite.

        One cache slot that is not finite spoils all proposals of the row. A check in each round
        would wait for the device.
        """
        self._misses[row] = self._misses.get(row, 0) + 1
        if self._misses[row] == _MISSES:
            self._misses[row] = 0
            if not self._draft.caches.finite(place):
                self.zero_row(place, row)


def _table(rows: int, width: int, counts: list[int], first: list[int]) -> DraftEntries:
    return DraftEntries(
        np.zeros((rows, width), np.int64), counts, first, np.full((rows, width), -1, np.int32)
    )
