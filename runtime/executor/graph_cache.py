from collections import deque
from contextlib import ExitStack

import msgspec

from hearth.runtime.executor.engine import BindingSnapshot, CapturedRun


class GraphCounters(msgspec.Struct):
    """Graphs captured, captures that failed (with the newest reason), and what became of steps.

    A step was launched from a graph (`hits`), found none that fits (`misses`), or found one that
    failed, so that an ordinary run took its place (`fallbacks`).
    """

    captures: int = 0
    failed_captures: int = 0
    failure: str = ""
    hits: int = 0
    misses: int = 0
    fallbacks: int = 0

    @property
    def reason(self) -> str:
        """Sentence about the captures that failed."""
        return f"{self.failed_captures} steps are not captured: {self.failure}"


class GraphCache:
    """Captured graphs by binding hash; a graph is used only when its whole snapshot agrees.

    Graphs of at most so many sets of addresses are kept, the newest.
    """

    def __init__(self, address_sets: int = 2) -> None:
        self.counters = GraphCounters()
        self._addresses: deque[tuple[int, ...]] = deque(maxlen=address_sets)
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
        """Keep a graph; an older one of the same hash is freed, and those of old addresses."""
        if snapshot.addresses not in self._addresses:
            self._addresses.append(snapshot.addresses)
        stale = [
            key
            for key, (known, _) in self._graphs.items()
            if key == snapshot.key or known.addresses not in self._addresses
        ]
        with ExitStack() as closing:
            for key in stale:
                closing.callback(self._graphs.pop(key)[1].close)
            self._graphs[snapshot.key] = (snapshot, graph)
            self.counters.captures += 1

    def expect(self, more: int) -> None:
        """Keep graphs of so many more sets of addresses."""
        sets = (self._addresses.maxlen or 0) + more
        self._addresses = deque(self._addresses, maxlen=sets)

    def drop(self, addresses: tuple[int, ...]) -> None:
        """Free all graphs of these addresses."""
        if addresses in self._addresses:
            self._addresses.remove(addresses)
        stale = [key for key, (known, _) in self._graphs.items() if known.addresses == addresses]
        with ExitStack() as closing:
            for key in stale:
                closing.callback(self._graphs.pop(key)[1].close)

    def clear(self) -> None:
        """Free all graphs."""
        with ExitStack() as closing:
            while self._graphs:
                _, (_, graph) = self._graphs.popitem()
                closing.callback(graph.close)

    def __len__(self) -> int:
        return len(self._graphs)
