"""What differs between the Python APIs of TensorRT 8.6 to 11, its lean runtime and TensorRT-RTX."""

import importlib
from contextlib import suppress
from typing import Any, Literal

import ml_dtypes
import numpy as np

from runtime.errors import HearthError

# The lean runtime is enough to run a plan; its own name is there only with its umbrella package.
MODULES = {
    "tensorrt": ("tensorrt", "tensorrt_lean", "tensorrt_lean_bindings"),
    "tensorrt_rtx": ("tensorrt_rtx",),
}
_DTYPES: dict[str, np.dtype[Any]] = {
    "FLOAT": np.dtype(np.float32),
    "HALF": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "INT8": np.dtype(np.int8),
    "BOOL": np.dtype(np.bool_),
}
_KEPT_MESSAGES = 4


def load_library(builder: Literal["tensorrt", "tensorrt_rtx"]) -> Any:
    """The first module that runs plans of `builder`; raises `engine_incompatible` without one."""
    for name in MODULES[builder]:
        with suppress(ImportError, OSError):
            return importlib.import_module(name)
    wanted = " or ".join(MODULES[builder])
    raise HearthError(
        "engine_incompatible", f"a TensorRT engine needs the Python module {wanted}", "backend"
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
    """A runtime that also reads plans which carry their own lean runtime."""
    runtime = library.Runtime(log)
    if hasattr(runtime, "engine_host_code_allowed"):
        runtime.engine_host_code_allowed = True
    return runtime


def context_bytes(engine: Any) -> int:
    """Scratch memory that serves every profile of an engine, in bytes."""
    for_profile = getattr(engine, "get_device_memory_size_for_profile_v2", None)
    if for_profile is not None:
        return max(int(for_profile(index)) for index in range(engine.num_optimization_profiles))
    return int(engine.device_memory_size)


def new_context(library: Any, engine: Any) -> Any:
    """An execution context without scratch memory of its own."""
    strategies = getattr(library, "ExecutionContextAllocationStrategy", None)
    if strategies is None:
        return engine.create_execution_context_without_device_memory()
    return engine.create_execution_context(strategies.USER_MANAGED)


def give_memory(context: Any, address: int, nbytes: int) -> None:
    """Let a context use scratch memory."""
    if hasattr(context, "set_device_memory"):
        context.set_device_memory(address, nbytes)
    else:
        context.device_memory = address


def numpy_dtype_of(name: str, dtype: Any) -> np.dtype[Any]:
    """A binding's type; raises `engine_incompatible` for one that is not served."""
    known = _DTYPES.get(dtype.name)
    if known is None:
        raise HearthError(
            "engine_incompatible", f"the engine's binding {name} has type {dtype.name}", name
        )
    return known
