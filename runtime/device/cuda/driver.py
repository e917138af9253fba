from collections.abc import Callable
from typing import Any

from hearth.runtime.errors import Code, HearthError
from hearth.runtime.packages import pip_install

_NO_BINDINGS = f"{pip_install('cuda13')}, or with a driver for CUDA 12 {pip_install('cuda12')}"
_NO_DRIVER = f"install the NVIDIA driver; one for CUDA 12 needs {pip_install('cuda12')}"
_OUT_OF_MEMORY = 2
# The numbers of `CUresult` do not change between versions.
_NO_DEVICE = frozenset({3, 34, 35, 36, 100, 101, 102, 200, 209, 222, 803, 804})
# After these the context accepts no more work: uncorrectable ECC, NVLink, illegal address, launch
# timeout, destroyed context, assert, hardware stack, illegal instruction, misaligned address,
# address space, program counter, launch failure, contained error, external device.
_STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 911})


def load_driver_api() -> Any:
    """The module `cuda.bindings.driver`; raises `engine_incompatible` if it is missing."""
    try:
        from cuda.bindings import driver  # noqa: PLC0415 (a CPU has no need of it)
    except ImportError as error:
        raise HearthError(
            "engine_incompatible", f"CUDA cannot be used ({error}): {_NO_BINDINGS}", "device"
        ) from error
    return driver


def error_code(status: int) -> Code:
    """Return the error code for a `CUresult` other than success."""
    if status == _OUT_OF_MEMORY:
        return "out_of_memory"
    if status in _NO_DEVICE:
        return "engine_incompatible"
    return "device_lost" if status in _STICKY else "executor_failed"


class CudaDriver:
    """The CUDA driver API with every result checked; `api` is `cuda.bindings.driver`."""

    def __init__(self, api: Any) -> None:
        self.api = api

    def function(self, name: str) -> Callable[..., Any]:
        """The unchecked function `name`, for callers that test its status themselves."""
        function: Callable[..., Any] = getattr(self.api, name)
        return function

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function; returns its one result, a tuple of several, or None.

        Raises the code of `error_code` with the call's name and CUDA's own text.
        """
        try:
            status, *values = getattr(self.api, name)(*arguments)
        except RuntimeError as error:
            # The bindings load libcuda at the first call.
            raise HearthError(
                "engine_incompatible", f"{name} cannot be called ({error}): {_NO_DRIVER}", "device"
            ) from error
        if status:
            raise self.failure(name, status)
        if len(values) == 1:
            return values[0]
        return tuple(values) if values else None

    def failure(self, name: str, status: Any) -> HearthError:
        """Make the error for `status`, the result of call `name`."""
        code = error_code(int(status))
        hint = f": {_NO_DRIVER}" if code == "engine_incompatible" else ""
        return HearthError(code, f"{name} failed: {self._text(status)}{hint}")

    def _text(self, status: Any) -> str:
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            failed, text = getattr(self.api, name)(status)
            texts.append("unknown" if failed or text is None else text.decode())
        return f"{texts[0]}, {texts[1]}"
