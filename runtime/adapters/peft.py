"""Reads an adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

import hashlib
import re
from collections.abc import Collection, Iterable
from contextlib import closing
from pathlib import Path
from sys import float_info
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.adapters.adapter import (
    Adapter,
    LowRank,
    Projection,
    check_rank,
    invalid,
    no_place,
    projection_shapes,
)
from runtime.config import LORA_TARGETS, LLMEngineRunnerConfig
from runtime.device.mapped_tensors import TensorFile, open_regular
from runtime.tensors.dtypes import numpy_dtype

PEFT_CONFIG = "adapter_config.json"
PEFT_TENSORS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_CONFIG_LIMIT = 1 << 20
_FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)

# What would change the numbers, and the value with which it does not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (),
    "alpha_pattern": (),
    "bias": ("none",),
    "fan_in_fan_out": (),
    # The others change the base as well, or begin from another one.
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
    "layer_replication": (),
    "lora_bias": (),
    "modules_to_save": (),
    "rank_pattern": (),
    "target_parameters": (),
    "trainable_token_indices": (),
    "use_dora": (),
    "use_qalora": (),
}
_READ = {"base_model_name_or_path", "lora_alpha", "peft_type", "r", "target_modules", "use_rslora"}
# What says how it was trained, or where: the tensors say what came of it.
_OF_TRAINING = {
    "arrow_config",
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
# Models of text, and the text of models that see as transformers spells it.
_NAME = re.compile(
    r"base_model\.model\.(?:model|model\.language_model|language_model\.model|model\.text_model)"
    r"\.layers\.(\d{1,4})\.(?:self_attn|mlp)\.([a-z]+)_proj\.lora_([AB])(?:\.default)?\.weight"
)


def read_peft(folder: Path, config: LLMEngineRunnerConfig) -> Adapter:
    """Read an adapter of PEFT's and check that it fits an engine.

    Raises `adapter_invalid` naming the file, the field of adapter_config.json or the tensor.
    """
    fields = _read_config(folder / PEFT_CONFIG)
    rank, scale = _rank_and_scale(fields, config)
    if not (folder / PEFT_TENSORS).is_file() and (folder / _PICKLED).exists():
        what = f"{_PICKLED} holds Python objects: save the adapter as {PEFT_TENSORS}"
        raise invalid(what, _PICKLED)
    shapes = projection_shapes(config)
    with closing(TensorFile(folder / PEFT_TENSORS, "adapter_invalid")) as file:
        reader = _Reader(file, rank, scale, numpy_dtype(config.dtype))
        parts = {
            place: reader.part(names, shapes[place])
            for place, names in _places(file.tensors, shapes).items()
        }
    _check_targets(fields, shapes, parts)
    base = fields.get("base_model_name_or_path") or ""
    return Adapter(rank, base, _digest(parts), parts)


def _digest(parts: dict[Projection, LowRank]) -> str:
    digest = hashlib.sha256()
    for place, part in sorted(parts.items()):
        digest.update(repr((place, part.a.shape)).encode())
        for matrix in part:
            digest.update(matrix.view(np.uint8).data)
    return digest.hexdigest()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            fields = msgspec.json.decode(file.read(_CONFIG_LIMIT), type=dict[str, Any])
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"{path} is missing or cannot be read", path.name) from error
    for name, value in fields.items():
        if name in _READ | _OF_TRAINING or not value:
            continue
        if name not in _NEUTRAL:
            raise invalid(f"{name} is not known to this Hearth", name)
        if value not in _NEUTRAL[name]:
            raise invalid(f"adapters with {name} are not served", name)
    if fields.get("peft_type") != "LORA":
        raise invalid("only adapters of peft_type LORA are served", "peft_type")
    base = fields.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise invalid("base_model_name_or_path must be a name", "base_model_name_or_path")
    return fields


def _rank_and_scale(fields: dict[str, Any], config: LLMEngineRunnerConfig) -> tuple[int, float]:
    rank, alpha = fields.get("r"), fields.get("lora_alpha", 8)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise invalid("r must be a whole number from 1 on", "r")
    check_rank(rank, config)
    rooted = fields.get("use_rslora")
    if not isinstance(rooted, bool | None):
        raise invalid("use_rslora must be true or false", "use_rslora")
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    # Whole numbers of JSON may be larger than any float.
    if not number or not abs(alpha) <= float_info.max:
        raise invalid("lora_alpha must be a number", "lora_alpha")
    return rank, alpha / (rank**0.5 if rooted else rank)


def _places(
    tensors: Collection[str], shapes: Collection[Projection]
) -> dict[Projection, dict[str, str]]:
    """The names of A and B by projection."""
    found: dict[Projection, dict[str, str]] = {}
    targets, layers = {target for _, target in shapes}, 1 + max(layer for layer, _ in shapes)
    for name in tensors:
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in LORA_TARGETS:
            raise invalid(f"tensor {name} has no place in an engine", name)
        if match[2] not in targets:
            raise no_place(name)
        layer, kind = int(match[1]), match[3]
        if layer >= layers:
            raise invalid(f"{name} is of another base: this model has {layers} layers", name)
        names = found.setdefault((layer, match[2]), {})
        if kind in names:
            raise invalid(f"{name} is there twice, as {names[kind]} as well", name)
        names[kind] = name
    if not found:
        raise invalid(f"{PEFT_TENSORS} holds no adapter", PEFT_TENSORS)
    return found


class _Reader(NamedTuple):
    """Turns what is stored into what is multiplied."""

    file: TensorFile
    rank: int
    scale: float
    dtype: np.dtype[Any]

    def part(self, names: dict[str, str], shape: tuple[int, int]) -> LowRank:
        if len(names) == 1:
            ((kind, name),) = names.items()
            raise invalid(f"{name} is there without its lora_{'B' if kind == 'A' else 'A'}", name)
        width, size = shape
        return LowRank(
            self._matrix(names["A"], (self.rank, width), 1.0),
            self._matrix(names["B"], (size, self.rank), self.scale),
        )

    def _matrix(self, name: str, shape: tuple[int, int], scale: float) -> NDArray[Any]:
        """The transpose of a tensor, in the engine's type."""
        stored = self.file.tensors[name]
        if stored.dtype not in _FLOATS:
            raise invalid(f"{name} has numbers of type {stored.dtype}", name)
        if stored.shape != shape:
            what = f"{name} has shape {list(stored.shape)}, rank and base imply {list(shape)}"
            raise invalid(what, name)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = self.file.read(name).astype(np.float32) * np.float32(scale)
            matrix = np.ascontiguousarray(scaled.T.astype(self.dtype))
        if not np.isfinite(matrix).all():
            raise invalid(f"{name} has numbers that are not finite in {self.dtype}", name)
        return matrix


def _check_targets(
    fields: dict[str, Any], shapes: Iterable[Projection], parts: Collection[Projection]
) -> None:
    """Raise where a projection was trained in every layer, and is not there in each."""
    modules = fields.get("target_modules")
    some = fields.get("layers_to_transform") or fields.get("exclude_modules")
    if some or not isinstance(modules, list):
        return
    for layer, target in shapes:
        if f"{target}_proj" in modules and (layer, target) not in parts:
            what = f"{PEFT_TENSORS} lacks the tensors of {target}_proj in layer {layer}"
            raise invalid(what, PEFT_TENSORS)
