import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import BindingSnapshot
from hearth.runtime.executor.graph_cache import GraphCache


class _Graph:
    closed = False

    def launch(self, stream: object, /) -> None:
        raise AssertionError(stream)

    def close(self) -> None:
        self.closed = True


def test_a_graph_is_found_by_its_snapshot() -> None:
    cache, graph = GraphCache(), _Graph()
    cache.store(BindingSnapshot(((1, (2,)),)), graph)
    assert cache.find(BindingSnapshot(((1, (2,)),))) is graph
    assert cache.find(BindingSnapshot(((1, (3,)),))) is None
    assert (len(cache), cache.counters.captures) == (1, 1)


def test_the_snapshot_of_the_capture_itself_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, graph, snapshot = GraphCache(), _Graph(), BindingSnapshot(((1, (2,)),))
    cache.store(snapshot, graph)
    monkeypatch.setattr(BindingSnapshot, "__eq__", lambda *_: pytest.fail("compared"))
    assert cache.find(snapshot) is graph


def test_graphs_of_addresses_are_dropped_and_more_may_be_expected() -> None:
    cache, graphs = GraphCache(1), [_Graph() for _ in range(4)]
    cache.expect(1)
    for graph, address, size in zip(graphs, (1, 1, 2, 3), (2, 3, 2, 2), strict=True):
        cache.store(BindingSnapshot(((address, (size,)),)), graph)
        if address == 2:
            cache.drop((1,))
    # Addresses that were dropped make room for others.
    assert [graph.closed for graph in graphs] == [True, True, False, False]
    cache.expect(-1)
    cache.store(BindingSnapshot(((3, (5,)),)), _Graph())
    assert [graph.closed for graph in graphs] == [True, True, True, False]
    cache.drop((9,))
    assert len(cache) == 2


def test_a_graph_of_the_same_hash_but_another_snapshot_is_not_used() -> None:
    cache = GraphCache()
    cache.store(BindingSnapshot(((1, (2,)),), key=7), _Graph())
    assert cache.find(BindingSnapshot(((9, (2,)),), key=7)) is None


def test_a_newer_graph_frees_the_older_of_its_hash() -> None:
    cache, older, newer = GraphCache(), _Graph(), _Graph()
    cache.store(BindingSnapshot(((1, (2,)),), key=7), older)
    cache.store(BindingSnapshot(((9, (2,)),), key=7), newer)
    assert (older.closed, newer.closed, len(cache)) == (True, False, 1)


def test_graphs_of_old_addresses_are_freed() -> None:
    cache = GraphCache()
    graphs = [_Graph() for _ in range(8)]
    # Two sizes of a step at each address, as after each time that a buffer is replaced.
    steps = [((address, (size,)),) for address in range(4) for size in (1, 2)]
    for step, graph in zip(steps, graphs, strict=True):
        cache.store(BindingSnapshot(step), graph)
    assert [graph.closed for graph in graphs] == [True] * 4 + [False] * 4
    assert [cache.find(BindingSnapshot(step)) for step in steps] == [None] * 4 + graphs[4:]
    assert (len(cache), cache.counters.captures) == (4, 8)


def test_graphs_of_as_many_addresses_as_asked_for_are_kept() -> None:
    cache, graphs = GraphCache(3), [_Graph() for _ in range(4)]
    for address, graph in enumerate(graphs):
        cache.store(BindingSnapshot(((address, (2,)),)), graph)
    assert [graph.closed for graph in graphs] == [True, False, False, False]


def test_clear_frees_every_graph() -> None:
    cache, graphs = GraphCache(), [_Graph(), _Graph()]
    for address, graph in enumerate(graphs):
        cache.store(BindingSnapshot(((address, (2,)),)), graph)
    cache.clear()
    assert [graph.closed for graph in graphs] == [True, True]
    assert len(cache) == 0


class _Stuck(_Graph):
    def close(self) -> None:
        super().close()
        raise HearthError("executor_failed", "cuGraphDestroy failed")


def test_a_graph_that_cannot_be_freed_keeps_no_other_back() -> None:
    cache, older, newer = GraphCache(), _Stuck(), _Stuck()
    cache.store(BindingSnapshot(((1, (2,)),), key=7), older)
    with pytest.raises(HearthError):
        cache.store(BindingSnapshot(((9, (2,)),), key=7), newer)
    last = _Graph()
    cache.store(BindingSnapshot(((1, (2,)),), key=8), last)
    with pytest.raises(HearthError):
        cache.clear()
    assert [graph.closed for graph in (older, newer, last)] == [True, True, True]
    assert len(cache) == 0
