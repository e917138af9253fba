from pathlib import Path

import numpy as np
import pytest

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import HostStream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor import engine_executor
from hearth.runtime.executor.engine import BindingSnapshot, EngineOptions, GraphCache
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.tensors.profiles import InferenceDims, Profile
from hearth.runtime.tensors.tensor import Tensor, TensorMap
from tests.runtime.executor.fake_engine import (
    FLOAT,
    FakeEngine,
    FakeRun,
    fake_registry,
    fake_tensors,
    host_binding,
)

STREAM = HostStream()
PROFILES = (
    Profile(*(InferenceDims.prefill(batch, 8, 16) for batch in (1, 2, 4))),
    Profile(*(InferenceDims.decode(batch, 16) for batch in (1, 2, 8))),
)


def _decode(batch: int) -> InferenceDims:
    return InferenceDims.decode(batch, 16)


def _executor() -> tuple[EngineExecutor, FakeEngine]:
    engine = FakeEngine()
    return EngineExecutor(engine, fake_registry(), PROFILES), engine


def test_a_step_is_bound_and_run() -> None:
    executor, engine = _executor()
    tensors = fake_tensors()
    executor.prepare(1, _decode(3), tensors, STREAM)
    executor.execute(STREAM)
    assert tensors.get("y").array.tolist() == [10, 11, 12, 0]
    assert engine.calls == ["profile 1", "run"]
    assert executor.counters.misses == 1


def test_a_captured_step_is_launched_and_other_steps_are_run() -> None:
    executor, engine = _executor()
    tensors = fake_tensors()
    executor.prepare(1, _decode(2), tensors, STREAM)
    executor.capture_graph(STREAM)
    assert executor.execute(STREAM)
    executor.prepare(1, _decode(3), tensors, STREAM)
    assert not executor.execute(STREAM)
    executor.prepare(1, _decode(2), tensors, STREAM)
    assert executor.execute(STREAM)
    assert engine.calls == ["profile 1", "capture", "launch", "run", "launch"]
    counters = executor.counters
    assert (counters.captures, counters.hits, counters.misses, counters.fallbacks) == (1, 2, 1, 0)
    assert len(executor._graphs) == 1


def test_a_buffer_that_moved_needs_another_graph() -> None:
    executor, engine = _executor()
    tensors = fake_tensors()
    executor.prepare(1, _decode(2), tensors, STREAM)
    executor.capture_graph(STREAM)
    moved = Tensor("x", np.full(4, 5, np.float32))
    tensors.set("x", moved)
    executor.prepare(1, _decode(2), tensors, STREAM)
    executor.execute(STREAM)
    assert engine.calls[-1] == "run"
    assert tensors.get("y").array[:2].tolist() == [15, 15]


def test_a_graph_that_fails_is_replaced_by_an_ordinary_run() -> None:
    executor, engine = _executor()
    tensors = fake_tensors()
    executor.prepare(1, _decode(2), tensors, STREAM)
    executor.capture_graph(STREAM)
    engine.failing = {"launch"}
    assert not executor.execute(STREAM)
    assert tensors.get("y").array[:2].tolist() == [10, 11]
    assert (executor.counters.fallbacks, executor.counters.hits) == (1, 0)
    engine.failing = {"launch", "run"}
    with pytest.raises(HearthError) as caught:
        executor.execute(STREAM)
    assert caught.value.code == "executor_failed"


def test_a_lost_device_is_named_by_the_graph_and_nothing_else_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, engine = _executor()
    executor.prepare(1, _decode(2), fake_tensors(), STREAM)
    executor.capture_graph(STREAM)

    def lose(*_: object) -> None:
        raise HearthError("device_lost", "cuGraphLaunch failed")

    monkeypatch.setattr(FakeRun, "launch", lose)
    with pytest.raises(HearthError, match="cuGraphLaunch"):
        executor.execute(STREAM)
    assert "run" not in engine.calls
    assert executor.counters.fallbacks == 0


def test_a_step_that_cannot_be_captured_is_run_and_counted() -> None:
    executor, engine = _executor()
    tensors = fake_tensors()
    executor.prepare(1, _decode(2), tensors, STREAM)
    engine.failing = {"capture"}
    executor.capture_graph(STREAM)
    counters = executor.counters
    assert (counters.captures, counters.failed_captures, counters.failure) == (0, 1, "as asked")
    executor.execute(STREAM)
    assert tensors.get("y").array[:2].tolist() == [10, 11]
    assert engine.calls == ["profile 1", "capture", "run", "run"]


def test_a_step_that_does_not_work_either_cannot_be_served() -> None:
    executor, engine = _executor()
    executor.prepare(1, _decode(2), fake_tensors(), STREAM)
    engine.failing = {"capture", "run"}
    with pytest.raises(HearthError):
        executor.capture_graph(STREAM)
    assert executor.counters.failed_captures == 0


def test_a_capture_that_loses_the_device_is_not_followed_by_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, engine = _executor()
    executor.prepare(1, _decode(2), fake_tensors(), STREAM)

    def lose(*_: object) -> None:
        raise HearthError("device_lost", "cuStreamEndCapture failed")

    monkeypatch.setattr(engine, "capture", lose)
    with pytest.raises(HearthError, match="cuStreamEndCapture"):
        executor.capture_graph(STREAM)
    assert "run" not in engine.calls


def test_a_prepared_step_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _ = _executor()
    tensors = fake_tensors()
    executor.prepare(1, _decode(2), tensors, STREAM)
    monkeypatch.setattr(TensorMap, "get", lambda *_: pytest.fail("bound again"))
    executor.prepare(1, _decode(2), tensors, STREAM)


def test_a_step_that_cannot_be_prepared_leaves_the_one_before() -> None:
    executor, engine = _executor()
    tensors = fake_tensors()
    executor.prepare(1, _decode(2), tensors, STREAM)
    with pytest.raises(HearthError):
        executor.prepare(1, _decode(9), tensors, STREAM)
    executor.prepare(1, _decode(2), tensors, STREAM)
    executor.execute(STREAM)
    assert tensors.get("y").array.tolist() == [10, 11, 0, 0]
    assert engine.calls == ["profile 1", "run"]


def test_a_step_of_other_buffers_is_another_step() -> None:
    executor, _ = _executor()
    first, second = fake_tensors(), fake_tensors()
    for tensors in (first, second):
        executor.prepare(1, _decode(2), tensors, STREAM)
    executor.execute(STREAM)
    assert first.get("y").array.tolist() == [0, 0, 0, 0]
    assert second.get("y").array.tolist() == [10, 11, 0, 0]


def test_prepared_steps_are_bounded() -> None:
    executor, _ = _executor()
    tensors = fake_tensors()
    for epoch in range(1000):
        tensors.epoch = epoch
        executor.prepare(1, _decode(2), tensors, STREAM)
    assert len(executor._prepared) == 256


def test_the_profile_is_switched_when_it_changes() -> None:
    executor, engine = _executor()
    tensors = fake_tensors()
    for profile, dims in ((1, _decode(2)), (1, _decode(1)), (0, InferenceDims.prefill(1, 8, 16))):
        executor.prepare(profile, dims, tensors, STREAM)
    assert engine.calls == ["profile 1", "profile 0"]


@pytest.mark.parametrize(
    ("profile", "dims", "field"),
    [
        (2, _decode(1), "profile"),
        (-1, _decode(1), "profile"),
        (1, _decode(9), "batch"),
        (1, _decode(0), "batch"),
    ],
)
def test_a_step_outside_the_profile_is_refused(
    profile: int, dims: InferenceDims, field: str
) -> None:
    executor, _ = _executor()
    with pytest.raises(HearthError) as caught:
        executor.prepare(profile, dims, fake_tensors(), STREAM)
    assert (caught.value.code, caught.value.field) == ("invalid_value", field)


def test_a_binding_without_a_buffer_is_named() -> None:
    executor, _ = _executor()
    tensors = TensorMap()
    tensors.set("x", fake_tensors().get("x"))
    with pytest.raises(HearthError, match="binding offset") as caught:
        executor.prepare(1, _decode(1), tensors, STREAM)
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "offset")


def test_a_buffer_of_another_type_is_named() -> None:
    executor, _ = _executor()
    tensors = fake_tensors()
    tensors.set("offset", Tensor.zeros("offset", (1,), np.dtype(np.float64)))
    with pytest.raises(HearthError, match="offset as float32, its buffer is float64"):
        executor.prepare(1, _decode(1), tensors, STREAM)


def test_a_step_larger_than_its_buffer_is_refused() -> None:
    executor, _ = _executor()
    with pytest.raises(HearthError, match="x for shape"):
        executor.prepare(1, _decode(5), fake_tensors(), STREAM)


@pytest.mark.parametrize("action", ["execute", "capture_graph"])
def test_a_step_must_be_prepared_first(action: str) -> None:
    executor, _ = _executor()
    with pytest.raises(HearthError, match="prepare a step"):
        getattr(executor, action)(STREAM)


def test_introspection() -> None:
    executor, engine = _executor()
    names = [executor.io_tensor_name(i) for i in range(executor.num_io_tensors)]
    assert names == ["x", "offset", "y"]
    assert executor.binding_dtype("y") == FLOAT
    assert executor.profile_shape("x", 1, "max") == (8,)
    assert executor.profile_shape("x", 0, "opt") == (2,)
    assert executor.engine is engine


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("io_tensor_name", (3,)),
        ("io_tensor_name", (-1,)),
        ("binding_dtype", ("z",)),
        ("profile_shape", ("offset", 0, "min")),
        ("profile_shape", ("x", 2, "min")),
    ],
)
def test_asking_for_what_is_not_there(call: str, arguments: tuple[object, ...]) -> None:
    executor, _ = _executor()
    with pytest.raises(HearthError) as caught:
        getattr(executor, call)(*arguments)
    assert caught.value.code == "invalid_value"


def test_context_memory_must_be_large_enough() -> None:
    executor, engine = _executor()
    assert executor.required_context_memory() == 64
    with pytest.raises(HearthError, match="needs 64 bytes"):
        executor.set_context_memory(Tensor.zeros("scratch", (15,), FLOAT))
    memory = Tensor.zeros("scratch", (16,), FLOAT)
    executor.set_context_memory(memory)
    assert engine.memory is memory


def test_other_context_memory_voids_what_was_captured() -> None:
    executor, engine = _executor()
    executor.prepare(1, _decode(2), fake_tensors(), STREAM)
    executor.capture_graph(STREAM)
    executor.set_context_memory(Tensor.zeros("scratch", (16,), FLOAT))
    executor.execute(STREAM)
    assert engine.calls[-2:] == ["free", "run"]
    assert len(executor._graphs) == 0


def test_an_engine_that_does_not_fit_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(engine_executor, "_open_engine", lambda *_, **__: engine)
    config = simulated_config(layers=1, max_batch=2)
    with pytest.raises(HearthError) as caught:
        EngineExecutor.create_for_llm(tmp_path, config, EngineOptions(), CpuDevice())
    assert caught.value.code == "engine_incompatible"
    assert engine.calls == ["close"]


def test_close_frees_graphs_before_the_engine() -> None:
    executor, engine = _executor()
    executor.prepare(1, _decode(2), fake_tensors(), STREAM)
    executor.capture_graph(STREAM)
    executor.close()
    assert engine.calls[-2:] == ["free", "close"]
    assert len(executor._graphs) == 0


def test_the_configuration_names_the_backend(tmp_path: Path) -> None:
    executor = EngineExecutor.create_for_llm(
        tmp_path, simulated_config(layers=1, max_batch=2), EngineOptions(), CpuDevice()
    )
    assert executor.num_io_tensors == 9
    assert executor.profile_shape("inputs_embeds", 0, "max") == (2, 256, 1)
    assert executor.profile_shape("k_cache_0", 1, "min") == (1, 1, 256, 2)


def _snapshot(*arrays: np.ndarray) -> BindingSnapshot:
    return BindingSnapshot.of(host_binding(str(i), "input", one) for i, one in enumerate(arrays))


def test_a_snapshot_holds_address_and_shape_of_every_binding() -> None:
    array = np.zeros((2, 3))
    assert _snapshot(array).bindings == ((array.ctypes.data, (2, 3)),)


def test_equal_bindings_are_equal_snapshots() -> None:
    array = np.zeros((2, 3))
    assert _snapshot(array, array) == _snapshot(array, array)
    assert hash(_snapshot(array)) == hash(_snapshot(array))


def test_another_address_shape_rank_or_order_is_another_snapshot() -> None:
    array, other = np.zeros((2, 3)), np.zeros((2, 3))
    kept = _snapshot(array, other)
    for differs in (
        _snapshot(array, array),
        _snapshot(array, other[:1]),
        _snapshot(array, other.reshape(1, 2, 3)),
        _snapshot(other, array),
        _snapshot(array),
    ):
        assert kept != differs
        assert kept.key != differs.key


def test_equality_looks_beyond_the_key() -> None:
    assert BindingSnapshot(((1, (2,)),), key=7) != BindingSnapshot(((1, (3,)),), key=7)
    assert BindingSnapshot(((1, (2,)),)) != "another kind of thing"


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
