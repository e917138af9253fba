import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.config import FileRecord, LLMEngineRunnerConfig
from hearth.runtime.device.device import HostStream, Stream
from hearth.runtime.engine_folder import PLAN_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.tensorrt_engine import (
    RuntimeCache,
    TensorRTEngine,
    load_plan,
    record_graph,
)
from hearth.runtime.executor.tensorrt_library import (
    MODULES,
    check_plan,
    has_old_memory_api,
    load_library,
    make_log,
    open_runtime,
)
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.engine_configs import PLAN, small_config
from tests.runtime.executor.fake_tensorrt import (
    STREAM,
    DataType,
    FakeEngine,
    ILogger,
    NewEngine,
    NumberedStream,
    OldEngine,
    RtxEngine,
    fake_library,
    step,
)


class Graph:
    def __init__(self, work: Callable[[], None]) -> None:
        work()

    def launch(self, stream: Stream, /) -> None:
        pass

    def close(self) -> None:
        pass


def record(_stream: Stream, work: Callable[[], None]) -> Graph:
    return Graph(work)


def open_fake(inner: FakeEngine) -> TensorRTEngine:
    version = "8.6.1" if isinstance(inner, OldEngine) else "10.16.1"
    library = fake_library(inner, version)
    inner.log = make_log(library)
    plan = structs.replace(PLAN, tensorrt_version=version)
    return TensorRTEngine(library, inner, inner.log, record, plan=plan)


@pytest.fixture(params=[OldEngine, NewEngine])
def inner(request: pytest.FixtureRequest) -> FakeEngine:
    made: FakeEngine = request.param()
    return made


def test_bindings_come_inputs_first_with_open_sizes_as_none(inner: FakeEngine) -> None:
    found = [(one.name, one.direction, one.shape) for one in open_fake(inner).io_tensors]
    assert found == [("x", "input", (None,)), ("table", "input", (7,)), ("y", "output", (None,))]


def test_every_profile_has_a_context_and_all_share_one_memory(inner: FakeEngine) -> None:
    engine = open_fake(inner)
    assert engine.required_context_memory == 640
    memory = Tensor.zeros("scratch", (640,), np.dtype(np.uint8))
    engine.set_context_memory(memory)
    size = () if isinstance(inner, OldEngine) else (640,)
    assert [one.memory for one in inner.contexts] == [(memory.address, *size)] * 2


def test_an_old_plan_in_a_new_library_gets_its_memory_the_old_way() -> None:
    # As the lean runtime 10.16 has both forms, and only the old one works for a plan of 8.6.
    class Both(OldEngine):
        def get_device_memory_size_for_profile_v2(self, _profile: int) -> int:
            return 0

    inner = Both()
    library = fake_library(inner, "10.16.1")
    engine = TensorRTEngine(library, inner, make_log(library), record, plan=PLAN)
    assert engine.required_context_memory == 640


def test_a_step_runs_in_the_context_of_its_profile(inner: FakeEngine) -> None:
    engine = open_fake(inner)
    engine.use_profile(1, STREAM)
    bindings = step(2)
    engine.run(bindings, STREAM)
    assert bindings[2].tensor.array.tolist() == [10, 11]
    assert inner.calls[0] == "1: profile 1 on 77"
    assert inner.calls[-1] == "1: execute on 77"


def test_a_profile_is_set_once(inner: FakeEngine) -> None:
    engine = open_fake(inner)
    for profile in (0, 1, 0, 1):
        engine.use_profile(profile, STREAM)
    assert inner.calls == ["0: profile 0 on 77", "1: profile 1 on 77"]


def test_an_unknown_profile_is_refused(inner: FakeEngine) -> None:
    with pytest.raises(HearthError, match="no profile 2"):
        open_fake(inner).use_profile(2, STREAM)


def test_a_steady_step_binds_nothing(inner: FakeEngine) -> None:
    engine = open_fake(inner)
    engine.use_profile(0, STREAM)
    bindings = step(3)
    engine.run(bindings, STREAM)
    inner.calls.clear()
    engine.run(bindings, STREAM)
    assert inner.calls == ["0: execute on 77"]


def test_bindings_are_kept_by_each_profile(inner: FakeEngine) -> None:
    engine = open_fake(inner)
    steps = {0: step(3), 1: step(2)}
    for _ in range(2):
        inner.calls.clear()
        for profile, bindings in steps.items():
            engine.use_profile(profile, STREAM)
            engine.run(bindings, STREAM)
    assert inner.calls == ["0: execute on 77", "1: execute on 77"]


def test_other_bindings_are_all_set(inner: FakeEngine) -> None:
    engine = open_fake(inner)
    engine.use_profile(0, STREAM)
    engine.run(step(3), STREAM)
    inner.calls.clear()
    engine.run(step(3), STREAM)
    assert inner.calls == [
        "0: shape x", "0: address x", "0: shape table", "0: address table", "0: address y",
        "0: execute on 77",
    ]  # fmt: skip


def test_new_memory_binds_anew(inner: FakeEngine) -> None:
    engine = open_fake(inner)
    bindings = step(1)
    engine.run(bindings, STREAM)
    inner.calls.clear()
    engine.set_context_memory(Tensor.zeros("scratch", (640,), np.dtype(np.uint8)))
    engine.run(bindings, STREAM)
    assert "0: address x" in inner.calls


def test_a_shape_out_of_the_profile_names_the_binding_and_the_range(inner: FakeEngine) -> None:
    engine = open_fake(inner)
    engine.use_profile(0, STREAM)
    with pytest.raises(HearthError) as error:
        engine.run(step(5), STREAM)
    assert (error.value.code, error.value.field) == ("invalid_value", "x")
    assert "(5,) in a step; profile 0 of the engine serves (1,) to (4,)" in error.value.message


def test_a_shape_that_the_library_refuses_is_an_error(inner: FakeEngine) -> None:
    engine = open_fake(inner)
    inner.failing.add("shape")
    with pytest.raises(HearthError, match=r"serves \(1,\) to \(4,\)"):
        engine.run(step(2), STREAM)


def test_bindings_that_failed_are_not_taken_for_bound(inner: FakeEngine) -> None:
    engine = open_fake(inner)
    bindings = step(2)
    inner.failing.add("address")
    with pytest.raises(HearthError, match="address of x"):
        engine.run(bindings, STREAM)
    inner.failing.clear()
    engine.run(bindings, STREAM)
    assert bindings[2].tensor.array.tolist() == [10, 11]


@pytest.mark.parametrize(
    ("reason", "code"),
    [("it broke", "executor_failed"), ("CUDA error: Out of memory", "out_of_memory")],
)
def test_a_failing_step_says_why(inner: FakeEngine, reason: str, code: str) -> None:
    engine = open_fake(inner)
    inner.failing.add("execute")
    inner.reason = reason
    with pytest.raises(HearthError, match=reason) as error:
        engine.run(step(2), STREAM)
    assert error.value.code == code


@pytest.mark.parametrize("call", ["profile", "address", "execute"])
def test_a_call_that_took_the_device_with_it_says_so(inner: FakeEngine, call: str) -> None:
    class Lost(NumberedStream):
        def synchronize(self) -> None:
            raise HearthError("device_lost", "cuStreamSynchronize failed: CUDA_ERROR_LAUNCH_FAILED")

    engine = open_fake(inner)
    inner.failing.add(call)

    def begin() -> None:
        engine.use_profile(1, Lost())
        engine.run(step(2), Lost())

    with pytest.raises(HearthError, match="CUDA_ERROR_LAUNCH_FAILED") as error:
        begin()
    assert error.value.code == "device_lost"


def test_a_capture_that_cannot_be_waited_for_has_lost_no_device(inner: FakeEngine) -> None:
    class Capturing(NumberedStream):
        def synchronize(self) -> None:
            raise HearthError("executor_failed", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")

    engine = open_fake(inner)
    inner.failing.add("execute")
    with pytest.raises(HearthError, match="it broke") as error:
        engine.run(step(2), Capturing())
    assert error.value.code == "executor_failed"


def test_a_capture_runs_once_before_it_records(inner: FakeEngine) -> None:
    engine = open_fake(inner)
    engine.use_profile(1, STREAM)
    engine.capture(step(2), STREAM)
    assert inner.calls[-2:] == ["1: execute on 77"] * 2
    assert inner.calls.count("1: address x") == 1


def test_a_context_that_does_not_fit_is_out_of_memory(inner: FakeEngine) -> None:
    inner.failing.add("context")
    with pytest.raises(HearthError) as error:
        open_fake(inner)
    assert error.value.code == "out_of_memory"


def test_a_type_that_is_not_served_is_refused(inner: FakeEngine) -> None:
    inner.dtype = DataType.FP8
    with pytest.raises(HearthError, match="FP8"):
        open_fake(inner)


def test_only_streams_of_cuda_are_captured() -> None:
    context: Any = None
    with pytest.raises(HearthError, match="stream of CUDA"):
        record_graph(context, HostStream(), lambda: None)


class TestLoadPlan:
    def config(self, nbytes: int) -> LLMEngineRunnerConfig:
        files = {PLAN_FILE: FileRecord(nbytes, "")}
        return structs.replace(small_config(), backend="tensorrt", plan=PLAN, files=files)

    def load(self, folder: Path, inner: FakeEngine, nbytes: int = 3) -> Any:
        library = fake_library(inner, "10.16.1")
        return load_plan(library, make_log(library), folder, self.config(nbytes))

    def test_host_code_is_allowed_first(self, tmp_path: Path) -> None:
        (tmp_path / PLAN_FILE).write_bytes(b"abc")
        inner = NewEngine()
        assert self.load(tmp_path, inner) is inner
        assert inner.calls == ["deserialize 3, host code True"]

    @pytest.mark.parametrize("data", [b"ab", b"", b"abcd", None])
    def test_another_size_never_reaches_the_library(
        self, tmp_path: Path, data: bytes | None
    ) -> None:
        if data is not None:
            (tmp_path / PLAN_FILE).write_bytes(data)
        inner = NewEngine()
        with pytest.raises(HearthError) as error:
            self.load(tmp_path, inner)
        assert (error.value.code, inner.calls) == ("engine_corrupt", [])

    @pytest.mark.parametrize(
        ("reason", "code"),
        [("magic tag", "engine_corrupt"), ("CUDA out of memory", "out_of_memory")],
    )
    def test_what_the_library_cannot_read(self, tmp_path: Path, reason: str, code: str) -> None:
        (tmp_path / PLAN_FILE).write_bytes(b"abc")
        inner = NewEngine()
        inner.failing.add("deserialize")
        inner.reason = reason
        with pytest.raises(HearthError, match=reason) as error:
            self.load(tmp_path, inner)
        assert error.value.code == code


RTX = structs.replace(PLAN, builder="tensorrt_rtx", tensorrt_version="1.7.1.116")
# What is called of it, by the class that has it in the package.
CALLS = {
    "ICudaEngine": "create_runtime_config create_execution_context get_tensor_profile_shape "
    "get_device_memory_size_for_profile_v2 num_optimization_profiles get_tensor_shape",
    "IRuntimeConfig": "create_runtime_cache set_runtime_cache "
    "set_execution_context_allocation_strategy dynamic_shapes_kernel_specialization_strategy",
    "IRuntimeCache": "serialize deserialize",
    "IExecutionContext": "set_device_memory set_optimization_profile_async set_input_shape "
    "set_tensor_address execute_async_v3",
    "ExecutionContextAllocationStrategy": "USER_MANAGED",
    "DynamicShapesKernelSpecializationStrategy": "EAGER LAZY",
    "BuilderFlag": "REQUIRE_USER_ALLOCATION",
}


def open_engine(inner: RtxEngine, path: Path) -> TensorRTEngine:
    library = fake_library(inner, RTX.tensorrt_version)
    inner.log = make_log(library)
    cache = RuntimeCache(library, inner, path)
    return TensorRTEngine(library, inner, inner.log, record, plan=RTX, cache=cache)


def test_a_plan_of_it_is_opened_with_memory_of_the_caller(tmp_path: Path) -> None:
    inner = RtxEngine()
    engine = open_engine(inner, tmp_path / "cache")
    assert engine.required_context_memory == 640
    memory = Tensor.zeros("scratch", (640,), np.dtype(np.uint8))
    engine.set_context_memory(memory)
    assert [one.memory for one in inner.contexts] == [(memory.address, 640)] * 2
    assert [one.strategy for one in inner.configs] == ["user managed"] * 2


def test_kernels_of_captured_steps_are_compiled_before_the_capture(tmp_path: Path) -> None:
    inner = RtxEngine()
    open_engine(inner, tmp_path / "cache")
    prefill, decode = (one.dynamic_shapes_kernel_specialization_strategy for one in inner.configs)
    assert (prefill, decode) == ("lazy", "eager")


def test_what_was_compiled_is_there_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "cache"
    first, second = RtxEngine(), RtxEngine()
    engine = open_engine(first, path)
    cache = first.configs[0].cache
    assert first.configs[1].cache is cache
    cache.data = b"ours: kernels"
    engine.use_profile(1, STREAM)
    engine.capture(step(2), STREAM)
    open_engine(second, path)
    found = second.configs[0].cache
    assert found.data == b"ours: kernels"


@pytest.mark.parametrize("data", [b"theirs", None])
def test_what_is_of_another_gpu_or_missing_is_compiled_anew(
    tmp_path: Path, data: bytes | None
) -> None:
    inner = RtxEngine()
    engine = open_engine(inner, tmp_path / "cache")
    cache = inner.configs[0].cache
    cache.data = data
    engine.use_profile(1, STREAM)
    engine.capture(step(2), STREAM)
    assert (tmp_path / "cache").exists() == (data is not None)
    again = RtxEngine()
    open_engine(again, tmp_path / "cache")
    found = again.configs[0].cache
    assert found.data == b""


@pytest.mark.rtx
@pytest.mark.parametrize("owner", CALLS)
def test_the_package_has_what_is_called(owner: str) -> None:
    rtx = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    missing = [name for name in CALLS[owner].split() if not hasattr(getattr(rtx, owner), name)]
    assert not missing


def _only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for candidates in MODULES.values():
        for name in candidates:
            monkeypatch.setitem(sys.modules, name, ModuleType(name) if name in names else None)


def test_the_whole_library_is_taken_before_the_lean_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "tensorrt", "tensorrt_lean")
    assert load_library("tensorrt").__name__ == "tensorrt"


def test_the_lean_runtime_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "tensorrt_lean_bindings", "tensorrt_rtx")
    assert load_library("tensorrt").__name__ == "tensorrt_lean_bindings"


def test_the_wheel_of_the_bindings_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "tensorrt_rtx_bindings")
    assert load_library("tensorrt_rtx").__name__ == "tensorrt_rtx_bindings"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "tensorrt")
    with pytest.raises(HearthError, match=r"tensorrt_rtx .*pip install 'tensorrt-rtx") as error:
        load_library("tensorrt_rtx")
    assert error.value.code == "engine_incompatible"
    _only(monkeypatch, "tensorrt_rtx")
    with pytest.raises(HearthError, match=r"pip install 'tensorrt-lean-cu13-bindings==10\.16"):
        load_library("tensorrt")


def test_a_log_keeps_the_newest_errors_until_they_are_taken() -> None:
    log = make_log(fake_library(NewEngine(), "10.0.0"))
    for number in range(9):
        log.log(ILogger.ERROR, str(number))
        log.log(ILogger.WARNING, "w")
    assert log.take() == "5; 6; 7; 8"
    assert log.take() == "no reason was given"


def test_host_code_is_not_asked_of_a_runtime_without_it() -> None:
    library = fake_library(NewEngine(), "8.5.0")
    del library.Runtime.engine_host_code_allowed
    runtime = open_runtime(library, None)
    assert not hasattr(runtime, "engine_host_code_allowed")


@pytest.mark.parametrize(
    ("builder", "version", "old"),
    [
        ("tensorrt", "8.6.1", True),
        ("tensorrt", "10.0.1", True),
        ("tensorrt", "10.1.0", False),
        ("tensorrt", "11.4.0.1", False),
        # Its numbers began anew, with the calls of TensorRT 10.
        ("tensorrt_rtx", "1.0.0.21", False),
        ("tensorrt_rtx", "1.7.1.116", False),
    ],
)
def test_the_memory_calls_follow_builder_and_version_of_the_plan(
    builder: Literal["tensorrt", "tensorrt_rtx"], version: str, *, old: bool
) -> None:
    plan = structs.replace(PLAN, builder=builder, tensorrt_version=version)
    assert has_old_memory_api(plan) is old


def test_a_library_that_does_not_start_has_a_reason() -> None:
    library = fake_library(NewEngine(), "10.16.1")
    log = make_log(library)

    def start(_log: object) -> None:
        log.log(ILogger.ERROR, "CUDA driver version is insufficient")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    library.Runtime, library.__name__ = start, "tensorrt"
    with pytest.raises(HearthError, match=r"tensorrt 10\.16\.1 .*driver version is") as caught:
        open_runtime(library, log)
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "backend")


CONFIG = structs.replace(small_config(), backend="tensorrt", plan=PLAN)


def check(version: str, *, built_by: str, compatible: bool) -> None:
    plan = structs.replace(PLAN, tensorrt_version=built_by, version_compatible=compatible)
    check_plan(structs.replace(CONFIG, plan=plan), version, "A", (9, 0))


@pytest.mark.parametrize(
    ("built_by", "version", "compatible"),
    [
        ("8.6.1", "8.6.1", False),
        ("10.16.1", "10.16.1.11", False),
        ("8.6.1", "10.16.1.11", True),
        ("10.3.0", "11.4.0", True),
        ("10.0.0b6", "10.0.0b6", False),
    ],
)
def test_a_plan_runs_on(built_by: str, version: str, *, compatible: bool) -> None:
    check(version, built_by=built_by, compatible=compatible)


@pytest.mark.parametrize(
    ("built_by", "version", "compatible"),
    [
        ("8.6.1", "10.16.1", False),
        ("10.16.1", "10.15.0", True),
        ("8.6.1", "11.4.0", True),
        ("10.16.1", "10.16.2", False),
    ],
)
def test_a_plan_does_not_run_on(built_by: str, version: str, *, compatible: bool) -> None:
    with pytest.raises(HearthError) as error:
        check(version, built_by=built_by, compatible=compatible)
    assert (error.value.code, error.value.field) == ("engine_incompatible", "tensorrt_version")
    assert built_by in error.value.message
    assert version in error.value.message
    assert "export the model again" in error.value.message


@pytest.mark.parametrize("field", ["gpu_name", "compute_capability"])
def test_a_plan_of_another_gpu_is_refused(field: str) -> None:
    plan = structs.replace(PLAN, **{field: "8.7"})
    with pytest.raises(HearthError) as error:
        check_plan(structs.replace(CONFIG, plan=plan), "8.6.1", "A", (9, 0))
    assert (error.value.code, error.value.field) == ("engine_incompatible", field)


def test_a_plan_of_rtx_runs_on_another_gpu_of_its_version() -> None:
    plan = structs.replace(
        PLAN,
        builder="tensorrt_rtx",
        tensorrt_version="1.7.1.116",
        version_compatible=False,
        gpu_name="B",
        compute_capability="8.6",
    )
    config = structs.replace(CONFIG, plan=plan)
    assert check_plan(config, "1.7.1.116", "A", (12, 0)) is plan
    with pytest.raises(HearthError, match=r"built by TensorRT-RTX 1\.7\.1"):
        check_plan(config, "1.8.0.1", "A", (12, 0))
    for board in ((8, 7), (9, 0), (11, 0)):
        with pytest.raises(HearthError, match=r"8\.9, or 12\.0 and newer; A has .*--device cuda"):
            check_plan(config, "1.7.1.116", "A", board)


def test_a_plan_of_this_gpu_is_taken() -> None:
    plan = structs.replace(PLAN, gpu_name="A", compute_capability="9.0")
    assert check_plan(structs.replace(CONFIG, plan=plan), "8.6.1", "A", (9, 0)) is plan


def test_a_folder_without_a_record_is_corrupt() -> None:
    with pytest.raises(HearthError) as error:
        check_plan(structs.replace(CONFIG, plan=None), "8.6.1", "A", (9, 0))
    assert error.value.code == "engine_corrupt"
