from contextlib import ExitStack

import msgspec

from runtime.executor.engine import CapturedRun
from runtime.executor.snapshot import BindingSnapshot


class GraphCounters(msgspec.Struct):
    """Graphs captured, and what became of steps.

    A step was launched from a graph (`hits`), found none that fits (`misses`), or found one that
    failed, so that an ordinary run took its place (`fallbacks`).
    """

    captures: int = 0
    hits: int = 0
    misses: int = 0
    fallbacks: int = 0


class GraphCache:
    """Captured graphs by binding hash; a graph is used only when its whole snapshot agrees."""

    def __init__(self) -> None:
        self.counters = GraphCounters()
        self._graphs: dict[int, tuple[BindingSnapshot, CapturedRun]] = {}

    def find(self, snapshot: BindingSnapshot) -> CapturedRun | None:
        """The graph of exactly this snapshot."""
        entry = self._graphs.get(snapshot.key)
        if entry is None:
            return None
        known, graph = entry
        # A step that stays prepared brings the very snapshot with which it was captured.
        return graph if known is snapshot or known == snapshot else None

    def store(self, snapshot: BindingSnapshot, graph: CapturedRun) -> None:
        """Keep a graph; an older one of the same hash is freed."""
        older = self._graphs.get(snapshot.key)
        self._graphs[snapshot.key] = (snapshot, graph)
        self.counters.captures += 1
        if older is not None:
            older[1].close()

    def clear(self) -> None:
        """Free all graphs."""
        with ExitStack() as closing:
            while self._graphs:
                _, (_, graph) = self._graphs.popitem()
                closing.callback(graph.close)

    def __len__(self) -> int:
        return len(self._graphs)
