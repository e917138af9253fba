"""Options of an export and of its plan, checked before anything is read or written."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

import msgspec

from hearth.runtime.config import LORA_TARGETS, Quantization
from hearth.runtime.errors import HearthError
from hearth.runtime.export.draft_config import DraftOptions, check_draft_options
from hearth.runtime.onnx_runtime import installed_version, reads_native
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


Dialect = Literal["native", "classic"]
TargetType = Literal["float32", "float16", "bfloat16"]
Backend = Literal["kernels", "onnxruntime", "tensorrt"]
BLOCK_SIZES = (0, 16, 32, 64, 128, 256)
KERNEL_BLOCKS = (0, 32, 64, 128)
# Larger blocks mean fewer scales to read; eight bits lose next to nothing by it, four bits do.
_BEST_BLOCK = {"int8": 128, "int4": 32}
_PREFILL_CHUNK = 256
_LONGEST_NAME = 128
MAX_LORA_RANK = 512
SMALLEST_CAPACITY = 2  # a prompt of one token, and one in answer


class ExportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an export to an engine folder; lengths in tokens.

    `backend` is the one that runs the decoder; "auto" takes TensorRT with a `plan`, Hearth's own
    kernels on CUDA, and ONNX Runtime on the CPU. `quantization` is that of matrix products;
    `head_quantization` of the one that gives the logits, "body" for that of the others; "auto" is
    int8 for int4 of a model below 500 million parameters, where it can be had, else "body".
    `block_size` counts weights that share one scale; 0 takes 128 for int8 and 32 for int4, or the
    next smaller size that divides every projection. `capacity` 0 takes the model's longest
    sequence, at most 4096. `prefill_chunk` is the longest piece of a prompt in one step; 0 takes
    256, or the capacity where that is less. With `plan` the graph becomes a TensorRT plan; `auto`
    then means the dialect that its builder reads. `device` is where it is to run. With `draft` a
    draft engine is made beside the model's, which then takes token trees and gives hidden states.
    `max_patches` is the largest call of a vision tower, and so of a picture; 0 takes 4096.
    `max_lora_rank` is the greatest rank of adapters, 0 for none; `lora_targets` are the projections
    that they may add to, all of them where none is named. `external_weights` leaves a graph without
    weights, and beside it a file of them, in whose place others of that shape may be served. `name`
    is what the model is called, "" for the folder's name.
    """

    name: str = ""
    backend: Literal["auto", "kernels", "onnxruntime", "tensorrt"] = "auto"
    dialect: Literal["auto", "native", "classic"] = "auto"
    dtype: TargetType = "float32"
    quantization: Quantization = "none"
    head_quantization: Literal["auto", "body", "none", "int8", "int4"] = "auto"
    block_size: int = 0
    capacity: int = 0
    max_batch: int = 8
    prefill_chunk: int = 0
    plan: PlanOptions | None = None
    draft: DraftOptions | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    max_patches: int = 0
    max_lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    external_weights: bool = False

    @property
    def engine(self) -> Backend:
        """Backend of the decoder."""
        if self.backend != "auto":
            return self.backend
        if self.plan is not None:
            return "tensorrt"
        return "kernels" if self.device == "cuda" else "onnxruntime"

    @property
    def head_weights(self) -> Quantization:
        """Quantisation of the product that gives the logits, of a large model."""
        match self.head_quantization:
            case "auto" | "body":
                return self.quantization
            case own:
                return own

    @property
    def verifies_trees(self) -> bool:
        """True if a graph takes a mask of token trees."""
        return self.draft is not None and self.draft.verify != "chains"

    @property
    def on_foreign_gpu(self) -> bool:
        """True if the decoder runs on a GPU by a library without int8."""
        cuda = self.engine == "onnxruntime" and self.device == "cuda"
        return cuda or self.engine == "tensorrt"


_CHOICES = {
    field.name: get_args(field.type)
    for field in msgspec.structs.fields(ExportOptions)
    if get_origin(field.type) is Literal
} | {"block_size": BLOCK_SIZES}
_RANGES = (
    ("max_batch", 1, 1024),
    ("prefill_chunk", 0, 1 << 20),
    ("capacity", 0, 1 << 20),
    ("max_patches", 0, 1 << 16),
    ("max_lora_rank", 0, MAX_LORA_RANK),
)
"""Least and greatest values of options, those that a daemon's settings can use."""


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
    if len(options.name) > _LONGEST_NAME or not options.name.isprintable():
        text = f"name must have at most {_LONGEST_NAME} characters that can be printed"
        raise HearthError("invalid_value", text, "name")
    for name, least, most in _RANGES:
        if not least <= getattr(options, name) <= most:
            raise HearthError("invalid_value", f"{name} must be {least} to {most}", name)
    _check_adapters(options)
    _check_quantization(options)
    if options.draft is not None:
        check_draft_options(options.draft, static=options.plan is not None)
    _check_target(options)


def _check_adapters(options: ExportOptions) -> None:
    if not set(options.lora_targets) <= {*LORA_TARGETS}:
        allowed = ", ".join(LORA_TARGETS)
        raise HearthError("invalid_value", f"lora_targets must be of {allowed}", "lora_targets")
    if options.lora_targets and not options.max_lora_rank:
        raise HearthError(
            "unsupported_option", "lora_targets needs a max_lora_rank above 0", "lora_targets"
        )


def _check_quantization(options: ExportOptions) -> None:
    kinds = {options.quantization, options.head_weights} - {"none"}
    plan, on_cuda = options.engine == "tensorrt", options.on_foreign_gpu
    faults = {
        "block_size": (options.block_size > 0 and not kinds, "only quantised weights have blocks"),
        "quantization": (
            on_cuda and "int8" in kinds,
            "TensorRT and ONNX Runtime's CUDA provider take int4, not int8: choose backend kernels",
        ),
        "external_weights": (
            plan and bool(kinds) and options.external_weights,
            "a TensorRT plan binds no quantised weights",
        ),
    }
    for name, (wrong, what) in faults.items():
        if wrong:
            raise HearthError("unsupported_option", what, name)


def _check_target(options: ExportOptions) -> None:
    if (options.engine == "tensorrt") != (options.plan is not None):
        raise HearthError(
            "unsupported_option", "backend tensorrt and a plan come together", "backend"
        )
    if options.engine == "kernels":
        _check_kernels(options)
        return
    if options.plan is not None:
        check_plan_options(options.plan, options.max_batch)
    elif options.dtype == "bfloat16" and (options.device == "cpu" or options.verifies_trees):
        where = "on the CPU" if options.device == "cpu" else "for token trees"
        raise HearthError(
            "unsupported_option", f"ONNX Runtime has no bfloat16 {where}: choose float16", "dtype"
        )


def _check_kernels(options: ExportOptions) -> None:
    """Hearth's own kernels: what they have no use for is for another backend."""
    others = "choose it with backend onnxruntime"
    draft = options.draft
    faults = {
        "device": (options.device == "cpu", "kernels run on a GPU: choose device cuda"),
        "dtype": (
            options.dtype == "float32",
            f"kernels take float16 and bfloat16, not float32: {others}",
        ),
        "dialect": (options.dialect == "classic", f"kernels have no dialect: {others}"),
        "block_size": (
            options.block_size not in KERNEL_BLOCKS,
            f"kernels take blocks of {', '.join(map(str, KERNEL_BLOCKS[1:]))}",
        ),
        "verify": (
            draft is not None and draft.verify != "auto",
            f"kernels take trees and chains alike: {others}",
        ),
    }
    for name, (wrong, what) in faults.items():
        if wrong:
            raise HearthError("unsupported_option", what, name)


def resolve_dialect(options: ExportOptions, version: str = "") -> Dialect:
    """The dialect to write: `auto` means native where ONNX Runtime `version` can read it.

    Without a version it is the installed one; raises `engine_incompatible` where there is none.
    """
    if options.dialect != "auto":
        return options.dialect
    return "native" if reads_native(version or installed_version()) else "classic"


def resolve_capacity(options: ExportOptions, longest: int, window: int | None = None) -> int:
    """Cache slots per row; `longest` is the longest sequence that the model was made for.

    A sliding `window` has to hide nothing: raises `invalid_value` for a capacity beyond it that is
    asked for, and `model_unsupported` where no option asked for another.
    """
    if options.capacity > longest:
        raise HearthError(
            "invalid_value", f"capacity must be at most {longest}, the model's limit", "capacity"
        )
    capacity = options.capacity or min(longest, 4096)
    if window is not None and capacity > window:
        what = f"the model's layers see {window} tokens, which only shorter rows do not notice"
        how = f"export with --capacity {window} or less"
        if options.capacity:
            raise HearthError("invalid_value", f"{what}: {how}", "capacity")
        raise HearthError("model_unsupported", f"{what}: {how}", "sliding_window")
    return capacity


def resolve_chunk(options: ExportOptions, capacity: int) -> int:
    """Tokens of a prompt in one step; raises `invalid_value` for more than a row holds."""
    if options.prefill_chunk > capacity:
        raise HearthError(
            "invalid_value",
            f"prefill_chunk must be at most {capacity}, the capacity",
            "prefill_chunk",
        )
    return options.prefill_chunk or min(_PREFILL_CHUNK, capacity)


def resolve_block_size(options: ExportOptions, inputs: Sequence[int]) -> int:
    """Weights per scale, 0 where nothing is quantised; `inputs` are the projections' input sizes.

    Kernels take 64 inputs at a time, and the scales of two blocks of 32 with them.
    Raises `invalid_value` when no block divides all of them, or the chosen one does not.
    """
    kind = options.quantization if options.quantization != "none" else options.head_weights
    if kind == "none":
        return 0
    largest = _BEST_BLOCK[kind]
    kernels = options.engine == "kernels"
    choices = [size for size in (KERNEL_BLOCKS if kernels else BLOCK_SIZES) if 0 < size <= largest]
    for size in [options.block_size] if options.block_size else reversed(choices):
        if not any(count % (max(size, 64) if kernels else size) for count in inputs):
            return size
    sizes = ", ".join(str(count) for count in sorted(set(inputs)))
    raise HearthError(
        "invalid_value",
        f"block_size{' and 64' * kernels} must divide the input size of every projection: {sizes}",
        "block_size",
    )
