from collections.abc import Sequence
from typing import Protocol

from hearth.runtime.batch import BatchReorder, DecodingRow
from hearth.runtime.device.device import PendingPaths, TreeBuffers
from hearth.runtime.executor.engine import GraphCounters


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
        """A chunk was queued: `lengths` tokens of each of these rows, from place `first` on."""

    def stepped(self, rows: Sequence[DecodingRow]) -> None:
        """A decode step of these rows was queued."""

    def ready(self, rows: Sequence[DecodingRow], speculating: Sequence[bool]) -> bool:
        """Return True if a round makes sense for the rows that speculate."""

    def propose(
        self, rows: Sequence[DecodingRow], speculating: Sequence[bool], trees: TreeBuffers
    ) -> list[int]:
        """Plant a tree for each row: the number of nodes, root included; 1 where not speculating.

        The step has as many nodes as the largest tree, and on a GPU always as many as fit.
        """

    def ahead(
        self,
        rows: Sequence[DecodingRow],
        speculating: Sequence[bool],
        paths: PendingPaths,
        width: int,
    ) -> None:
        """Walks of trees of `width` nodes are queued: what may be queued of the next round."""

    def accepted(
        self, rows: Sequence[DecodingRow], nodes: Sequence[Sequence[int]], width: int
    ) -> None:
        """A round of `width` nodes a row kept these nodes of each."""

    def zero_row(self, place: int, row: DecodingRow) -> None:
        """A round of the row at this place failed: forget numbers that may not be finite."""

    def drafted(self, row: DecodingRow) -> int:
        """Entries of the method's own cache for the row's second token on, without a gap."""

    def capture(self, batch_sizes: Sequence[int]) -> list[int]:
        """Capture the method's own steps, between batches; gives the tree sizes to capture."""

    @property
    def counters(self) -> GraphCounters:
        """The captures and steps of the method's own engine, if any."""

    def close(self) -> None:
        """Free engines."""
