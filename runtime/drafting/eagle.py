from collections.abc import Sequence

import numpy as np

from runtime.device.device import TreeBuffers
from runtime.drafting.draft_runner import DraftEntries, EagleDraftRunner
from runtime.executor.graph_cache import GraphCounters
from runtime.options import EagleDraftingConfig
from runtime.rows import DecodingRow
from runtime.steps.pipeline_io import PipelineIO

_MISSES = 8
"""Rounds in a row without an accepted token after which a draft's cache is looked at."""


class EagleProposer:
    """Trees of an EAGLE-3 draft engine.

    The draft's cache has an entry for each token but the first. The newest of them wait, with the
    place of their hidden state in the base's output, until a round begins; what a later base step
    overwrites meanwhile is left out.
    """

    def __init__(
        self, draft: EagleDraftRunner, io: PipelineIO, drafting: EagleDraftingConfig
    ) -> None:
        self._draft = draft
        (self._hidden,), (self._prompt,) = io.step.hidden, io.prompt.hidden
        self._tail = io.waiting
        self._width = drafting.tree_size
        self.room = max(drafting.tree_size, drafting.proposal_size, drafting.most_accepted)
        self._waiting: dict[DecodingRow, list[int]] = {}
        self._asked: Sequence[bool] = ()
        self._misses = [0] * draft.caches.lengths.shape[0]

    def begin(self, rows: int) -> None:
        """Empty the draft's cache."""
        self._draft.caches.reset(rows)
        self._waiting = {}

    def prefilled(self, rows: Sequence[DecodingRow], lengths: Sequence[int]) -> None:
        """Append the chunk's entries; the one of a row's last prompt token waits."""
        width = max(lengths)
        self._waiting = {}
        for place, (row, added) in enumerate(zip(rows, lengths, strict=True)):
            if not row.prompt_left:
                saved = self._tail + place
                last = place * width + added - 1
                self._draft.save_hidden(self._prompt, [last], self._hidden, saved)
                self._waiting[row] = [saved]
        first = [row.filled - added for row, added in zip(rows, lengths, strict=True)]
        counts = [
            min(added, len(row.initial) - 1 - begin)
            for row, added, begin in zip(rows, lengths, first, strict=True)
        ]
        if not any(counts):
            return
        entries = _table(len(rows), max(counts), counts, first)
        for place, (row, count, begin) in enumerate(zip(rows, counts, first, strict=True)):
            entries.token_ids[place, :count] = row.initial[begin + 1 : begin + 1 + count]
            entries.hidden[place, :count] = place * width + np.arange(count)
        self._draft.execute_prefill_step(entries, self._prompt)

    def stepped(self, rows: Sequence[DecodingRow]) -> None:
        """The newest token's entry waits; older ones that did are lost."""
        self._waiting = {row: [place] for place, row in enumerate(rows)}

    def ready(self, rows: Sequence[DecodingRow], _speculating: Sequence[bool]) -> bool:
        """Whether every row has an entry waiting: a prompt that ended in an older chunk has not."""
        return all(row in self._waiting for row in rows)

    def propose(
        self, rows: Sequence[DecodingRow], speculating: Sequence[bool], trees: TreeBuffers
    ) -> list[int]:
        """Enter what waits, grow the proposal, and plant its best nodes."""
        self._asked = speculating
        waiting = [self._waiting[row] for row in rows]
        counts = [len(places) for places in waiting]
        first = [row.filled - count for row, count in zip(rows, counts, strict=True)]
        batch, width = self._draft.accept_shape(len(rows), max(counts))
        spare = batch - len(rows)
        entries = _table(batch, width, counts + [1] * spare, first + [0] * spare)
        for place, (row, places) in enumerate(zip(rows, waiting, strict=True)):
            known = len(row.token_ids) - len(places)
            entries.token_ids[place, : len(places)] = row.token_ids[known:]
            entries.hidden[place, : len(places)] = places
        self._draft.execute_accept_step(entries, self._hidden, len(rows))
        self._draft.execute_proposal_steps(len(rows))
        self._draft.finish(trees, speculating, self._width)
        return [self._width if wanted else 1 for wanted in speculating]

    def accepted(
        self, rows: Sequence[DecodingRow], nodes: Sequence[Sequence[int]], width: int
    ) -> None:
        """The entries of the kept nodes wait."""
        self._waiting = {
            row: [place * width + node for node in path]
            for place, (row, path) in enumerate(zip(rows, nodes, strict=True))
        }
        for place, path in enumerate(nodes):
            self._count_miss(place, missed=self._asked[place] and len(path) == 1)

    def compact(self, mapping: Sequence[int]) -> None:
        """Drop the draft's rows that leave; what waits lies where the step left it."""
        self._draft.caches.compact(mapping)
        for place, target in enumerate(mapping):
            if target >= 0:
                self._misses[target] = self._misses[place]

    def zero_row(self, row: int) -> None:
        """Zero the draft's cache of a row."""
        self._draft.caches.zero_row(row)

    def capture(self, batch_sizes: Sequence[int]) -> list[int]:
        """Capture both draft steps."""
        self._draft.capture_draft_accept_graph(batch_sizes)
        self._draft.capture_draft_proposal_graph(batch_sizes)
        return [self._width]

    @property
    def counters(self) -> GraphCounters:
        """Those of the draft engine."""
        return self._draft.executor.counters

    def close(self) -> None:
        """Free the draft engine."""
        self._draft.close()

    def _count_miss(self, place: int, *, missed: bool) -> None:
        """Zero a draft's cache that proposes nothing of use because its numbers are not finite.

        One such slot spoils what every later row at this place is proposed; to look in each round
        would wait for the device.
        """
        self._misses[place] = self._misses[place] + 1 if missed else 0
        if self._misses[place] == _MISSES:
            self._misses[place] = 0
            if not self._draft.caches.finite(place):
                self.zero_row(place)


def _table(rows: int, width: int, counts: list[int], first: list[int]) -> DraftEntries:
    return DraftEntries(
        np.zeros((rows, width), np.int64), counts, first, np.full((rows, width), -1, np.int32)
    )
