from collections.abc import Sequence

import numpy as np

from runtime.arrangement import Arrangement
from runtime.device.device import PendingPaths, TreeBuffers, TreeOps
from runtime.drafting.lookup import NgramIndex
from runtime.executor.graph_cache import GraphCounters
from runtime.options import SpeculationOptions
from runtime.reference.token_trees import NO_NODE
from runtime.rows import DecodingRow


class _IndexedRow:
    """The index of one row's tokens and how many of them are in it."""

    def __init__(self, row: DecodingRow, options: SpeculationOptions) -> None:
        self._row = row
        self._index = NgramIndex((), options.lookup_ngram, options.lookup_shortest)
        self._count = 0

    def propose(self, tokens: int) -> list[int]:
        """What may follow the tokens that are known by now."""
        self._index.append(self._row.token_ids[self._count :])
        self._count = len(self._row.token_ids)
        return self._index.propose(tokens)


class LookupProposer:
    """Chains that go on as the row's own text did before: no engine, so nothing to keep in step.

    On a GPU every chain is planted at full width, because each width needs a graph.
    """

    def __init__(self, ops: TreeOps, options: SpeculationOptions, *, fixed_width: bool) -> None:
        self._ops = ops
        self._options = options
        self._fixed_width = fixed_width
        self.room = options.lookup_tokens + 1
        self._rows: dict[DecodingRow, _IndexedRow] = {}

    def rearrange(self, arrangement: Arrangement) -> None:
        """Nothing lies by place."""

    def prefilled(
        self, rows: Sequence[DecodingRow], lengths: Sequence[int], width: int, first: int
    ) -> None:
        """Nothing to keep."""

    def stepped(self, rows: Sequence[DecodingRow]) -> None:
        """Nothing to keep."""

    def ready(self, rows: Sequence[DecodingRow], speculating: Sequence[bool]) -> bool:
        """Whether any row has a proposal."""
        return any(map(len, self._proposals(rows, speculating)))

    def propose(
        self, rows: Sequence[DecodingRow], speculating: Sequence[bool], trees: TreeBuffers
    ) -> list[int]:
        """Plant a chain for each row."""
        proposals = self._proposals(rows, speculating)
        longest = max(map(len, proposals))
        width = self.room if self._fixed_width else 1 + longest
        # A step that runs padded has no tree of an earlier row at the places behind.
        places = trees.ids.shape[0] if self._fixed_width else len(rows)
        ids = np.zeros((places, width), np.int32)
        parents = np.full((places, width), NO_NODE, np.int32)
        parents[:, 0] = -1
        for place, tokens in enumerate(proposals):
            ids[place, 1 : 1 + len(tokens)] = tokens
            parents[place, : 1 + len(tokens)] = np.arange(-1, len(tokens))
        self._ops.plant(trees, ids, parents)
        return [1 + len(tokens) for tokens in proposals]

    def ahead(
        self,
        _rows: Sequence[DecodingRow],
        _speculating: Sequence[bool],
        _paths: PendingPaths,
        _width: int,
    ) -> None:
        """What follows is looked up once it is known."""

    def accepted(
        self, rows: Sequence[DecodingRow], nodes: Sequence[Sequence[int]], width: int
    ) -> None:
        """Nothing to keep: the next proposal reads the rows' tokens."""

    def zero_row(self, _place: int, _row: DecodingRow) -> None:
        """No numbers are kept."""

    def drafted(self, _row: DecodingRow) -> int:
        """There are no entries."""
        return 0

    def capture(self, _batch_sizes: Sequence[int]) -> list[int]:
        """No steps of its own; on the CPU a chain may have any length."""
        return [self.room] if self._fixed_width else list(range(2, self.room + 1))

    @property
    def counters(self) -> GraphCounters:
        """There is no engine."""
        return GraphCounters()

    def close(self) -> None:
        """Nothing to free."""

    def _proposals(
        self, rows: Sequence[DecodingRow], speculating: Sequence[bool]
    ) -> list[list[int]]:
        # Rows that left are forgotten.
        known = self._rows
        self._rows = {row: known.get(row) or _IndexedRow(row, self._options) for row in rows}
        return [
            self._rows[row].propose(self._options.lookup_tokens) if wanted else []
            for row, wanted in zip(rows, speculating, strict=True)
        ]
