"""Options of a TensorRT plan, apart from the graph."""

import sys
from pathlib import Path
from typing import Literal

import msgspec

from hearth.runtime.errors import HearthError
from hearth.runtime.packages import version_numbers

Builder = Literal["tensorrt", "tensorrt_rtx"]
"""The first is the complete TensorRT, which "auto" takes before TensorRT-RTX."""
HIGHEST_LEVEL = 5
Feature = Literal["native dialect", "drafts", "bfloat16", "strong typing", "int4"]
# By TensorRT version. The plan that 8.6 makes of a draft ends its library with an internal error of
# Myelin when it is opened, in the lean runtime 10.16.
_SINCE: dict[Feature, tuple[int, int]] = {
    "native dialect": (10, 15),
    "drafts": (10, 0),
    "bfloat16": (9, 0),
    "strong typing": (9, 0),
    "int4": (10, 0),
}


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a plan; `python` is the interpreter that has the builder's module.

    `builder` "auto" is the first that this interpreter can import.
    `workspace_bytes` 0 and `optimization_level` None leave the builder's own choice. `timing_cache`
    None keeps no timings. `decode_batches` empty takes every power of two up to the largest batch,
    and that. `kv_cache_dtype` "auto" is the engine's own type, and float32 without strong typing.
    """

    builder: Builder | Literal["auto"] = "auto"
    python: str = sys.executable
    version_compatible: bool = False
    workspace_bytes: int = 0
    optimization_level: int | None = None
    timing_cache: Path | None = None
    decode_batches: tuple[int, ...] = ()
    kv_cache_dtype: Literal["auto", "float32"] = "auto"


def check_plan_options(options: PlanOptions, max_batch: int) -> None:
    """Raise `invalid_value` naming the first option that has no meaning."""
    level = options.optimization_level
    if options.workspace_bytes < 0:
        raise HearthError("invalid_value", "workspace must not be negative", "workspace_bytes")
    if level is not None and not 0 <= level <= HIGHEST_LEVEL:
        raise HearthError(
            "invalid_value", f"optimization level is 0 to {HIGHEST_LEVEL}", "optimization_level"
        )
    if options.kv_cache_dtype not in ("auto", "float32"):
        raise HearthError(
            "invalid_value", "kv_cache_dtype must be one of auto, float32", "kv_cache_dtype"
        )
    sizes = options.decode_batches
    if sizes and (sizes != tuple(sorted(set(sizes))) or sizes[0] < 1 or sizes[-1] != max_batch):
        raise HearthError(
            "invalid_value",
            f"decode batches must rise from 1 or more to the largest batch, {max_batch}",
            "decode_batches",
        )


def resolve_decode_batches(options: PlanOptions, max_batch: int) -> tuple[int, ...]:
    """The batch sizes that get a static decode profile, the largest last."""
    if options.decode_batches:
        return options.decode_batches
    powers = [1 << n for n in range(max_batch.bit_length()) if 1 << n < max_batch]
    return (*powers, max_batch)


def has_feature(feature: Feature, builder: Builder, version: str) -> bool:
    """Return True if a builder has a feature; TensorRT-RTX has all of them.

    Without strong typing a plan makes float32 copies of narrower caches in every step. Kept in
    float32 they need none: less memory, and a step a fifth shorter (docs/tensorrt.md).
    """
    return builder == "tensorrt_rtx" or version_numbers(version) >= _SINCE[feature]
