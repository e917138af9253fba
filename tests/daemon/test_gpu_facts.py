import re
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
from cuda.bindings import nvrtc
from msgspec import structs

from hearth.daemon import gpu_facts as module
from hearth.daemon.gpu_facts import GPUFacts, check_gpu, gpu_facts, serving_library
from hearth.runtime.errors import HearthError
from tests.runtime.engine_configs import PLAN, small_config

GPU = GPUFacts(
    name="Some GPU",
    compute_capability=(9, 0),
    driver="13.0",
    memory_total=8 << 30,
    memory_free=6 << 30,
)
GPU_PLAN = structs.replace(
    PLAN,
    tensorrt_version="10.16.1",
    version_compatible=False,
    gpu_name="Some GPU",
    compute_capability="9.0",
)


class FakeContext:
    def __init__(self) -> None:
        self.closed = False
        self.properties = SimpleNamespace(name="Some GPU", compute_capability=(9, 0))
        self.driver = SimpleNamespace(call={"cuDriverGetVersion": 13000}.__getitem__)

    def memory(self) -> tuple[int, int]:
        return 6 << 30, 8 << 30

    def free_memory(self) -> int:
        return 6 << 30

    def close(self) -> None:
        self.closed = True


def test_facts_are_asked_for_in_a_context_that_is_given_back() -> None:
    context: Any = FakeContext()
    assert gpu_facts(lambda: context) == GPU
    assert context.closed


def test_an_integrated_gpu_has_no_free_memory_of_its_own() -> None:
    context: Any = FakeContext()
    context.free_memory = lambda: None
    assert gpu_facts(lambda: context).memory_free is None


def test_a_context_is_given_back_when_an_answer_fails() -> None:
    context: Any = FakeContext()
    context.driver = SimpleNamespace(call={}.__getitem__)
    with pytest.raises(KeyError):
        gpu_facts(lambda: context)
    assert context.closed


KERNELS = structs.replace(small_config(), backend="kernels", device="cuda", dtype="float16")


def test_kernels_are_compiled_and_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"NVRTC \d+\.\d+", serving_library(KERNELS))
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (1, 0, 0))
    with pytest.raises(HearthError, match="does not say its version") as caught:
        serving_library(KERNELS)
    assert caught.value.code == "engine_incompatible"


def test_kernels_need_a_gpu_from_ampere_on() -> None:
    check_gpu(KERNELS, structs.replace(GPU, compute_capability=(8, 0)), "NVRTC 13.0")
    with pytest.raises(HearthError, match=r"has 7\.5: export with --backend onnxruntime") as caught:
        check_gpu(KERNELS, structs.replace(GPU, compute_capability=(7, 5)), "NVRTC 13.0")
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "device")


def test_the_library_of_an_onnx_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.31.1")
    monkeypatch.setattr(onnxruntime, "get_available_providers", list)
    assert serving_library(small_config()) == "onnxruntime 1.31.1"
    config = structs.replace(small_config(), device="cuda")
    with pytest.raises(HearthError, match="pip install") as caught:
        serving_library(config)
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "device")
    names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)
    assert serving_library(config) == "onnxruntime 1.31.1"
    monkeypatch.setattr(onnxruntime, "__version__", "1.29.0")
    with pytest.raises(HearthError, match=r"needs ONNX Runtime 1\.30 or newer, this is 1\.29\.0"):
        serving_library(config)


def test_the_library_of_a_plan_is_the_builders(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(builder: str) -> object:
        asked.append(builder)
        return SimpleNamespace(__name__="tensorrt_lean", __version__="10.16.1")

    monkeypatch.setattr(module, "load_library", load)
    config = structs.replace(small_config(), device="cuda", backend="tensorrt", plan=GPU_PLAN)
    assert serving_library(config) == "tensorrt_lean 10.16.1"
    assert asked == ["tensorrt"]


def test_a_simulated_engine_needs_no_library() -> None:
    assert serving_library(structs.replace(small_config(), backend="simulated")) == "simulated"


def test_a_plan_is_compared_with_gpu_and_library() -> None:
    config = structs.replace(small_config(), device="cuda", backend="tensorrt", plan=GPU_PLAN)
    check_gpu(config, GPU, "tensorrt_lean 10.16.1")
    with pytest.raises(HearthError, match=r"TensorRT 10.16.1") as caught:
        check_gpu(config, GPU, "tensorrt 11.0.0")
    assert caught.value.code == "engine_incompatible"
    with pytest.raises(HearthError, match="compute capability"):
        check_gpu(config, structs.replace(GPU, compute_capability=(8, 9)), "tensorrt 10.16.1")
    check_gpu(small_config(), GPU, "onnxruntime 1")
