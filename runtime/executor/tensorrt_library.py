"""TensorRT as a library: plans that it runs, and differences of 8.6, 10, 11, lean and RTX."""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import ml_dtypes
import numpy as np

from hearth.runtime.config import PlanRecord
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineConfig
from hearth.runtime.packages import pip_install, version_numbers

# The lean runtime is enough to run a plan; its own name is there only with its umbrella package.
MODULES = {
    "tensorrt": ("tensorrt", "tensorrt_lean", "tensorrt_lean_bindings"),
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
_DTYPES: dict[str, np.dtype[Any]] = {
    "FLOAT": np.dtype(np.float32),
    "HALF": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "INT8": np.dtype(np.int8),
    "UINT8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_KEPT_MESSAGES = 4
_NEW_MEMORY_API = (10, 1)


def load_library(builder: Literal["tensorrt", "tensorrt_rtx"]) -> Any:
    """The first module that runs plans of `builder`; raises `engine_incompatible` without one."""
    for name in MODULES[builder]:
        with suppress(ImportError, OSError):
            return importlib.import_module(name)
    wanted = " or ".join(MODULES[builder])
    remedy = pip_install("tensorrt_rtx")
    if builder == "tensorrt":
        lean = pip_install("tensorrt_lean")
        remedy = f"it comes with the system, and a version-compatible plan runs by {lean}"
    raise HearthError(
        "engine_incompatible",
        f"a TensorRT engine needs the Python module {wanted}: {remedy}",
        "backend",
    )


def make_log(library: Any) -> Any:
    """A logger of `library` whose `errors` are the newest messages; `take` empties them."""

    class Log(library.ILogger):  # type: ignore[misc] # the module is chosen at run time
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (library.ILogger.INTERNAL_ERROR, library.ILogger.ERROR):
                self.errors = [*self.errors[1 - _KEPT_MESSAGES :], message]

        def take(self) -> str:
            text, self.errors = "; ".join(self.errors), []
            return text or "no reason was given"

    return Log()


def open_runtime(library: Any, log: Any) -> Any:
    """A runtime that also reads plans which carry their own lean runtime.

    Raises `engine_incompatible` if the library does not start, for example with an old driver.
    """
    try:
        runtime = library.Runtime(log)
    except TypeError as error:  # The bindings make it of a null pointer.
        raise HearthError(
            "engine_incompatible",
            f"{library.__name__} {library.__version__} does not start ({log.take()}): does the "
            "driver serve its CUDA?",
            "backend",
        ) from error
    if hasattr(runtime, "engine_host_code_allowed"):
        runtime.engine_host_code_allowed = True
    return runtime


def has_old_memory_api(plan: PlanRecord) -> bool:
    """Return True if scratch memory is set by the calls of TensorRT 8, not in TensorRT-RTX.

    The plan decides it, not the library: a version-compatible plan brings a runtime of
    its own, and for one from before 10.1 the newer calls log an error, return 0 and set nothing.
    """
    old = version_numbers(plan.tensorrt_version) < _NEW_MEMORY_API
    return plan.builder == "tensorrt" and old


def context_bytes(engine: Any, *, old_api: bool) -> int:
    """Scratch memory that serves every profile of an engine, in bytes."""
    if not old_api:
        each = engine.get_device_memory_size_for_profile_v2
        return max(int(each(index)) for index in range(engine.num_optimization_profiles))
    with _deprecated():
        return int(engine.device_memory_size)


def new_context(library: Any, engine: Any, *, old_api: bool) -> Any:
    """An execution context without scratch memory of its own."""
    if not old_api:
        strategy = library.ExecutionContextAllocationStrategy.USER_MANAGED
        return engine.create_execution_context(strategy)
    with _deprecated():
        return engine.create_execution_context_without_device_memory()


def give_memory(context: Any, address: int, nbytes: int, *, old_api: bool) -> None:
    """Let a context use scratch memory."""
    if old_api:
        with _deprecated():
            context.device_memory = address
    else:
        context.set_device_memory(address, nbytes)


@contextmanager
def _deprecated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def numpy_dtype_of(name: str, dtype: Any) -> np.dtype[Any]:
    """A binding's type; raises `engine_incompatible` for one that is not served."""
    known = _DTYPES.get(dtype.name)
    if known is None:
        raise HearthError(
            "engine_incompatible", f"the engine's binding {name} has type {dtype.name}", name
        )
    return known


# TensorRT 11 reads version-compatible plans from 10 on, 10 those of 8.6.
_OLDEST_READ_BY_11 = 10
_NAMES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
_RTX_SERVES, _RTX_SINCE = {(8, 0), (8, 6), (8, 9)}, (12, 0)
RTX_GPUS = "compute capability 8.0, 8.6, 8.9, or 12.0 and newer"
"""GPUs that plans of TensorRT-RTX run on."""


def built_by(plan: PlanRecord) -> str:
    """Name and version of the library that built a plan."""
    return f"{_NAMES[plan.builder]} {plan.tensorrt_version}"


def check_plan(
    config: EngineConfig, version: str, gpu_name: str, compute_capability: tuple[int, int]
) -> PlanRecord:
    """The record of the plan, when TensorRT `version` on this GPU can run it.

    A plan of TensorRT-RTX is for every GPU that it serves: the library compiles it where it runs.
    Raises `engine_corrupt` without a record and `engine_incompatible` naming what differs.
    """
    plan = config.plan
    if plan is None:
        raise HearthError("engine_corrupt", "nothing says what built the plan", "plan")
    if not _readable(plan, version):
        also = " or newer" if plan.version_compatible else ""
        raise _rebuild(
            config,
            f"was built by {built_by(plan)} and runs on that{also}; this is {version}",
            "tensorrt_version",
        )
    capability = "{}.{}".format(*compute_capability)
    if plan.builder == "tensorrt_rtx":
        if compute_capability in _RTX_SERVES or compute_capability >= _RTX_SINCE:
            return plan
        raise HearthError(
            "engine_incompatible",
            f"plans of TensorRT-RTX run on GPUs of {RTX_GPUS}; {gpu_name} has {capability}: export "
            "the model with --device cuda, for Hearth's own kernels",
            "compute_capability",
        )
    if plan.compute_capability not in ("", capability):
        raise _rebuild(
            config,
            f"was built for compute capability {plan.compute_capability}; {gpu_name} has "
            f"{capability}",
            "compute_capability",
        )
    if plan.gpu_name not in ("", gpu_name):
        raise _rebuild(config, f"was built for {plan.gpu_name}, this is {gpu_name}", "gpu_name")
    return plan


def _readable(plan: PlanRecord, version: str) -> bool:
    built, have = version_numbers(plan.tensorrt_version), version_numbers(version)
    if built == have or not plan.version_compatible:
        return built == have
    return have > built and (have[0] <= _OLDEST_READ_BY_11 or built[0] >= _OLDEST_READ_BY_11)


def _rebuild(config: EngineConfig, what: str, field: str) -> HearthError:
    return HearthError(
        "engine_incompatible",
        f"the plan of Hearth {config.hearth_version} {what}: export the model again with "
        "--backend tensorrt on the machine that is to run it",
        field,
    )
