"""What an export is asked for, checked before anything is read or written."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import onnxruntime

from runtime.errors import HearthError

Dialect = Literal["native", "classic"]
TargetType = Literal["float32", "float16"]
Quantization = Literal["none", "int8", "int4"]
BLOCK_SIZES = (0, 16, 32, 64, 128, 256)
# Larger blocks mean fewer scales to read; eight bits lose next to nothing by it, four bits do.
_BEST_BLOCK = {"int8": 128, "int4": 32}
FIRST_NATIVE_RUNTIME = (1, 24)
SMALLEST_CAPACITY = 2  # a prompt of one token, and one in answer


class ExportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a model becomes an engine folder; lengths in tokens.

    `block_size` counts weights that share one scale; 0 takes 128 for int8 and 32 for int4, or the
    next smaller size that divides every projection. `capacity` 0 takes the model's longest
    sequence, at most 4096. `prefill_chunk` is the longest piece of a prompt in one step.
    """

    dialect: Literal["auto", "native", "classic"] = "auto"
    dtype: TargetType = "float32"
    quantization: Quantization = "none"
    block_size: int = 0
    capacity: int = 0
    max_batch: int = 8
    prefill_chunk: int = 256


_CHOICES = {
    "dialect": ("auto", "native", "classic"),
    "dtype": ("float32", "float16"),
    "quantization": ("none", "int8", "int4"),
    "block_size": BLOCK_SIZES,
}


def check_options(options: ExportOptions) -> None:
    """Raise `invalid_value` naming the first option that has no meaning."""
    for name, choices in _CHOICES.items():
        if getattr(options, name) not in choices:
            allowed = ", ".join(map(str, choices))
            raise HearthError("invalid_value", f"{name} must be one of {allowed}", name)
    if options.capacity and options.capacity < SMALLEST_CAPACITY:
        raise HearthError(
            "invalid_value", f"capacity must be 0 or at least {SMALLEST_CAPACITY}", "capacity"
        )
    for name in ("max_batch", "prefill_chunk"):
        if getattr(options, name) < 1:
            raise HearthError("invalid_value", f"{name} must be at least 1", name)


def resolve_dialect(options: ExportOptions, version: str = onnxruntime.__version__) -> Dialect:
    """The dialect to write: `auto` means native where this ONNX Runtime can read it."""
    if options.dialect != "auto":
        return options.dialect
    major, minor = version.split(".")[:2]
    return "native" if (int(major), int(minor)) >= FIRST_NATIVE_RUNTIME else "classic"


def resolve_capacity(options: ExportOptions, longest: int) -> int:
    """Cache slots per row; `longest` is the longest sequence that the model was made for."""
    if options.capacity > longest:
        raise HearthError(
            "invalid_value", f"capacity must be at most {longest}, the model's limit", "capacity"
        )
    return options.capacity or min(longest, 4096)


def resolve_block_size(options: ExportOptions, inputs: Sequence[int]) -> int:
    """Weights per scale, 0 where nothing is quantised; `inputs` are the projections' input sizes.

    Raises `invalid_value` when no block divides all of them, or the chosen one does not.
    """
    if options.quantization == "none":
        return 0
    largest = _BEST_BLOCK[options.quantization]
    choices = [size for size in BLOCK_SIZES if 0 < size <= largest]
    for size in [options.block_size] if options.block_size else reversed(choices):
        if not any(count % size for count in inputs):
            return size
    sizes = ", ".join(str(count) for count in sorted(set(inputs)))
    raise HearthError(
        "invalid_value",
        f"block_size must divide the input size of every projection: {sizes}",
        "block_size",
    )
