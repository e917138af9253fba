"""Facts of a GPU, and the library that would run an engine on it; nothing is loaded."""

from collections.abc import Callable

import msgspec

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cuda.compiler import compiler_version, load_compiler_api
from hearth.runtime.device.cuda.context import CudaContext, open_context
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.tensorrt_library import check_plan, load_library
from hearth.runtime.onnx_runtime import check_provider, check_version, load_onnx_runtime

_FIRST_FOR_KERNELS = (8, 0)


class GPUFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU; memory in bytes, `driver` is the newest version of CUDA that it serves.

    `memory_free` is None where it shares the host's memory.
    """

    name: str
    compute_capability: tuple[int, int]
    driver: str
    memory_total: int
    memory_free: int | None


def gpu_facts(opening: Callable[[], CudaContext] = open_context) -> GPUFacts:
    """Ask the first GPU, in a context that is given back; raises `engine_incompatible`.

    The free memory is that which is left beside this context.
    """
    context = opening()
    try:
        version = int(context.driver.call("cuDriverGetVersion"))
        return GPUFacts(
            name=context.properties.name,
            compute_capability=context.properties.compute_capability,
            driver=f"{version // 1000}.{version % 1000 // 10}",
            memory_total=context.memory()[1],
            memory_free=context.free_memory(),
        )
    finally:
        context.close()


def serving_library(config: LLMEngineRunnerConfig) -> str:
    """Name and version of the library that would run an engine of `config`.

    It is the compiler of an engine of kernels. Raises `engine_incompatible` where it is not
    installed, too old or cannot use a GPU.
    """
    if config.backend == "tensorrt":
        library = load_library(config.plan.builder if config.plan else "tensorrt")
        return f"{library.__name__} {library.__version__}"
    if config.backend == "simulated":
        return "simulated"
    if config.backend == "kernels":
        return f"NVRTC {compiler_version(load_compiler_api())}"
    library = load_onnx_runtime()
    if config.device == "cuda":
        check_provider(library)
    check_version(config.dialect, config.device, library.__version__)
    return f"onnxruntime {library.__version__}"


def check_gpu(config: LLMEngineRunnerConfig, gpu: GPUFacts, library: str) -> None:
    """Check that this GPU and library run such an engine; raises `engine_incompatible`."""
    if config.backend == "kernels" and gpu.compute_capability < _FIRST_FOR_KERNELS:
        raise HearthError(
            "engine_incompatible",
            f"Hearth's kernels need a GPU of compute capability 8.0 or newer, {gpu.name} has "
            f"{'.'.join(map(str, gpu.compute_capability))}: export with --backend onnxruntime",
            "device",
        )
    if config.backend == "tensorrt":
        check_plan(config, library.rpartition(" ")[2], gpu.name, gpu.compute_capability)
