"""ONNX Runtime as a library: whether it is installed, and what its version can do."""

from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hearth.runtime.errors import HearthError
from hearth.runtime.packages import pip_install, pip_uninstall, version_numbers

CUDA_PROVIDER = "CUDAExecutionProvider"
_NATIVE_SINCE = (1, 24)
"""The oldest release that reads the opset of the native dialect."""
_CUDA_SINCE = (1, 30)
"""The oldest release whose CUDA provider is tested with decoders and vision towers."""


def load_onnx_runtime() -> Any:
    """The module `onnxruntime`; raises `engine_incompatible` with the command that brings it."""
    try:
        return import_module("onnxruntime")
    except ImportError as error:
        raise HearthError(
            "engine_incompatible",
            f"there is no engine library ({error}): {pip_install('onnxruntime')}; on an NVIDIA GPU "
            f"Hearth's own kernels (--device cuda) need instead: {pip_install('cuda13')}",
            "engine_kind",
        ) from error


def installed_version() -> str:
    """The version that is installed, of whichever build; raises as `load_onnx_runtime` does."""
    for name in ("onnxruntime-gpu", "onnxruntime"):
        with suppress(PackageNotFoundError):
            return version(name)
    return str(load_onnx_runtime().__version__)


def reads_native(version: str) -> bool:
    """Return True if ONNX Runtime `version` reads the native dialect."""
    return version_numbers(version) >= _NATIVE_SINCE


def check_version(dialect: str, device: str, version: str) -> None:
    """Raise `engine_incompatible` when ONNX Runtime `version` cannot run `dialect` on `device`."""
    if device == "cuda" and version_numbers(version) < _CUDA_SINCE:
        raise HearthError(
            "engine_incompatible",
            f"an engine for CUDA needs ONNX Runtime 1.30 or newer, this is {version}: on Python "
            f"3.11 or newer {pip_install('onnxruntime-gpu')}, or export with --backend kernels",
            "device",
        )
    if dialect == "native" and not reads_native(version):
        raise HearthError(
            "engine_incompatible",
            f"a native engine needs ONNX Runtime 1.24 or newer, this is {version}: export the "
            "model again with the classic dialect, or use Python 3.11 or newer",
            "dialect",
        )


def check_provider(library: Any) -> None:
    """Raise `engine_incompatible` when this ONNX Runtime was built without CUDA."""
    if CUDA_PROVIDER not in library.get_available_providers():
        raise HearthError(
            "engine_incompatible",
            f"this ONNX Runtime ({library.__version__}) has no CUDA: "
            f"{pip_uninstall('onnxruntime')}, then "
            f"{pip_install('onnxruntime-gpu', '--force-reinstall')}",
            "device",
        )
