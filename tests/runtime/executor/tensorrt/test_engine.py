from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.config import FileRecord, LLMEngineRunnerConfig
from hearth.runtime.device.device import HostStream, Stream
from hearth.runtime.engine_folder import PLAN_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.tensorrt.engine import TensorRTEngine, load_plan, record_graph
from hearth.runtime.executor.tensorrt.library import make_log
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.engine_configs import PLAN, small_config
from tests.runtime.executor.tensorrt.fake_library import (
    STREAM,
    DataType,
    FakeEngine,
    NewEngine,
    NumberedStream,
    OldEngine,
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
