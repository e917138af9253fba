from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.executor.tensorrt.engine import RuntimeCache, TensorRTEngine
from hearth.runtime.executor.tensorrt.library import make_log
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.engine_configs import PLAN
from tests.runtime.executor.tensorrt.fake_library import STREAM, RtxEngine, fake_library, step
from tests.runtime.executor.tensorrt.test_engine import record

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
