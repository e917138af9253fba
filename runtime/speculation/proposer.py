"""Proposers of token trees, and prompt lookup, which proposes from the text itself."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from hearth.runtime.batch import BatchReorder, DecodingRow
from hearth.runtime.device.device import PendingPaths, TreeBuffers, TreeOps
from hearth.runtime.executor.engine import GraphCounters
from hearth.runtime.options import SpeculationOptions
from hearth.runtime.reference.token_trees import NO_NODE


class Proposer(Protocol):
    """A method of speculation: plants a token tree for each decoding row of a batch.

    The runtime tells it of every step, so that it can keep its own state of the rows; rows come
    by their places. It is a row owner.
    """

    @property
    def room(self) -> int:
        """Free cache slots that a round needs in every row."""

    def reorder(self, reorder: BatchReorder) -> None:
        """Move rows and admit new ones to their places."""

    def prefilled(
        self, rows: Sequence[DecodingRow], lengths: Sequence[int], width: int, first: int
    ) -> None:
        """Note that a chunk was queued: `lengths` tokens of these rows, from place `first` on."""

    def stepped(self, rows: Sequence[DecodingRow]) -> None:
        """Note that a decode step of these rows was queued."""

    def ready(self, rows: Sequence[DecodingRow], speculating: Sequence[bool]) -> bool:
        """Return True if a round makes sense for the rows that speculate."""

    def propose(
        self, rows: Sequence[DecodingRow], speculating: Sequence[bool], trees: TreeBuffers
    ) -> list[int]:
        """Plant a tree for each row; returns numbers of nodes, 1 (the root) without speculation.

        The step has as many nodes a row as the largest tree; on a GPU always the same number.
        """

    def ahead(
        self,
        rows: Sequence[DecodingRow],
        speculating: Sequence[bool],
        paths: PendingPaths,
        width: int,
    ) -> None:
        """Queue steps of the next round behind queued walks of trees of `width` nodes."""

    def accepted(
        self, rows: Sequence[DecodingRow], nodes: Sequence[Sequence[int]], width: int
    ) -> None:
        """Note the nodes that a round of `width` nodes a row kept of each row."""

    def zero_row(self, place: int, row: DecodingRow) -> None:
        """Forget numbers of the row at this place that may not be finite: its round failed."""

    def drafted(self, row: DecodingRow) -> int:
        """Entries of the method's own cache for the row's second token on, without a gap."""

    def capture(self, batch_sizes: Sequence[int]) -> list[int]:
        """Capture the method's own steps, between batches; gives the tree sizes to capture."""

    @property
    def counters(self) -> GraphCounters:
        """The captures and steps of the method's own engine, if any."""

    def close(self) -> None:
        """Free engines."""


class NgramIndex:
    """Proposes the tokens that followed an earlier occurrence of a text's newest tokens.

    This is prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding)
    over prompt and answer alike. Suffixes of up to `longest` tokens lie in a trie that is walked
    from the newest token backwards, so a token costs at most `longest` steps; suffixes below
    `shortest` tokens propose nothing.
    """

    def __init__(self, token_ids: Iterable[int], longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest
        self._token_ids: list[int] = []
        # A node is a suffix; its number is its place in `_ends`, node 0 the empty one.
        self._children: dict[tuple[int, int], int] = {}
        self._ends = [0]
        self.append(token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        """Add the newest tokens."""
        for token in token_ids:
            self._enter()
            self._token_ids.append(token)

    def propose(self, count: int) -> list[int]:
        """At most `count` tokens after the longest, then latest, earlier occurrence; or none.

        An occurrence that reaches into the newest tokens goes on in its own continuation, so a
        text that repeats itself is proposed to repeat.
        """
        start = self._continuation()
        if start is None:
            return []
        known = self._token_ids
        period = len(known) - start
        return [known[start + place % period] for place in range(count)]

    def _enter(self) -> None:
        """Note the suffixes before the next token, which will be their continuation."""
        node = 0
        end = len(self._token_ids)
        for token in self._newest():
            node = self._children.setdefault((node, token), len(self._ends))
            if node == len(self._ends):
                self._ends.append(end)
            self._ends[node] = end

    def _continuation(self) -> int | None:
        """Position behind the earlier occurrence of the longest known suffix; None without one."""
        node, length, start = 0, 0, None
        for token in self._newest():
            child = self._children.get((node, token))
            if child is None:
                break
            node, length = child, length + 1
            if length >= self._shortest:
                start = self._ends[node]
        return start

    def _newest(self) -> Iterable[int]:
        return reversed(self._token_ids[-self._longest :])


class _IndexedRow:
    """The index of one row's tokens, and the number of tokens in it."""

    def __init__(self, row: DecodingRow, options: SpeculationOptions) -> None:
        self._row = row
        self._index = NgramIndex((), options.lookup_ngram, options.lookup_shortest)
        self._count = 0

    def propose(self, tokens: int) -> list[int]:
        """Propose up to `tokens` tokens behind the known ones."""
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

    def reorder(self, reorder: BatchReorder) -> None:
        """Nothing lies by place."""

    def prefilled(
        self, rows: Sequence[DecodingRow], lengths: Sequence[int], width: int, first: int
    ) -> None:
        """Nothing to keep."""

    def stepped(self, rows: Sequence[DecodingRow]) -> None:
        """Nothing to keep."""

    def ready(self, rows: Sequence[DecodingRow], speculating: Sequence[bool]) -> bool:
        """Return True if any row has a proposal."""
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
        self._ops.upload_tree(trees, ids, parents)
        return [1 + len(tokens) for tokens in proposals]

    def ahead(
        self,
        _rows: Sequence[DecodingRow],
        _speculating: Sequence[bool],
        _paths: PendingPaths,
        _width: int,
    ) -> None:
        """Do nothing: a proposal is looked up once its tokens are known."""

    def accepted(
        self, rows: Sequence[DecodingRow], nodes: Sequence[Sequence[int]], width: int
    ) -> None:
        """Do nothing: the next proposal reads the rows' tokens."""

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
