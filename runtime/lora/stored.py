"""An adapter of PEFT, and as Hearth keeps it: checked once, in the engine's type, with a digest.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import closing, suppress
from pathlib import Path
from sys import float_info
from typing import Any, Literal, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from hearth.runtime.config import LORA_TARGETS, LLMEngineRunnerConfig
from hearth.runtime.device.mapped_tensors import TensorFile, open_regular
from hearth.runtime.errors import HearthError
from hearth.runtime.files import file_digest, fresh_folder
from hearth.runtime.lora.adapter import (
    Adapter,
    LowRank,
    Projection,
    check_rank,
    invalid,
    no_place,
    projection_shapes,
)
from hearth.runtime.tensors.tensor import numpy_dtype

PEFT_CONFIG = "adapter_config.json"
PEFT_TENSORS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_CONFIG_LIMIT = 1 << 20
_LARGEST_RANK = 1 << 16
_FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)

# Fields that would change the numbers, and the value with which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (),
    "bias": ("none",),
    "fan_in_fan_out": (),
    # The others change the base as well, or begin from another one.
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
    "layer_replication": (),
    "lora_bias": (),
    "modules_to_save": (),
    "target_parameters": (),
    "trainable_token_indices": (),
    "use_dora": (),
    "use_qalora": (),
}
_READ = {
    "alpha_pattern",
    "base_model_name_or_path",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "use_rslora",
}
# Fields of the training alone: the tensors are its result.
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
    r"base_model\.model\."
    r"((?:model|model\.language_model|language_model\.model|model\.text_model)"
    r"\.layers\.(\d{1,4})\.(?:self_attn|mlp)\.([a-z]+)_proj)\.lora_([AB])(?:\.default)?\.weight"
)
# A pattern is an expression of whoever saved the adapter: one that may take for ever is refused.
_MOST_PATTERNS, _LONGEST_PATTERN, _MOST_REPEATS = 1 << 14, 256, 3
_ENDLESS = re.compile(r"\)[*+{]|\(\?(?!:)|\\[1-9]|[*+?}][*+{]")


def read_peft(folder: Path, config: LLMEngineRunnerConfig) -> Adapter:
    """Read an adapter of PEFT's and check that it fits an engine.

    Raises `adapter_invalid` naming the file, the field of adapter_config.json or the tensor.
    """
    fields = _read_config(folder / PEFT_CONFIG)
    scaling = _scaling(fields)
    check_rank(1 if scaling.ranks else scaling.rank, config)
    if not (folder / PEFT_TENSORS).is_file() and (folder / _PICKLED).exists():
        what = f"{_PICKLED} holds Python objects: save the adapter as {PEFT_TENSORS}"
        raise invalid(what, _PICKLED)
    shapes = projection_shapes(config)
    with closing(TensorFile(folder / PEFT_TENSORS, "adapter_invalid")) as file:
        found = _places(file.tensors, shapes)
        rank = max(scaling.of(names.module)[0] for names in found.values())
        check_rank(rank, config, scaling.field)
        reader = _Reader(file, scaling, numpy_dtype(config.dtype))
        parts = {place: reader.part(names, shapes[place]) for place, names in found.items()}
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


Patterns = list[tuple[re.Pattern[str], Any]]


class _Scaling(NamedTuple):
    """The rank and alpha of every module: the first pattern's that matches, else these."""

    rank: int
    alpha: float
    ranks: Patterns
    alphas: Patterns
    rooted: bool

    @property
    def field(self) -> str:
        """Field of the PEFT configuration that sets the ranks."""
        return "rank_pattern" if self.ranks else "r"

    def of(self, module: str) -> tuple[int, float]:
        """The rank of a module by its name in the base, and its scale."""
        rank = _matching(self.ranks, module, self.rank)
        alpha = _matching(self.alphas, module, self.alpha)
        return rank, alpha / (rank**0.5 if self.rooted else rank)


def _matching(patterns: Patterns, module: str, default: Any) -> Any:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _scaling(fields: dict[str, Any]) -> _Scaling:
    rooted = fields.get("use_rslora")
    if not isinstance(rooted, bool | None):
        raise invalid("use_rslora must be true or false", "use_rslora")
    return _Scaling(
        _rank(fields.get("r"), "r"),
        _alpha(fields.get("lora_alpha", 8), "lora_alpha"),
        _patterns(fields, "rank_pattern", _rank),
        _patterns(fields, "alpha_pattern", _alpha),
        bool(rooted),
    )


def _rank(value: Any, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_RANK:
        raise invalid(f"{field} must say whole numbers from 1 on", field)
    return value


def _alpha(value: Any, field: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Whole numbers of JSON may be larger than any float.
    if not number or not abs(value) <= float_info.max:
        raise invalid(f"{field} must say numbers", field)
    return float(value)


def _patterns(fields: dict[str, Any], field: str, read: Callable[[Any, str], Any]) -> Patterns:
    """Expressions for names of modules, each for the end of a name behind a dot, as PEFT has them.

    Raises `adapter_invalid` naming the field for one that is none, or that may take too long.
    """
    given = fields.get(field) or {}
    if not isinstance(given, dict) or len(given) > _MOST_PATTERNS:
        raise invalid(f"{field} must say so for {_MOST_PATTERNS} patterns at most", field)
    patterns = []
    for pattern, value in given.items():
        repeats = sum(pattern.count(sign) for sign in "*+{")
        if len(pattern) > _LONGEST_PATTERN or repeats > _MOST_REPEATS or _ENDLESS.search(pattern):
            raise invalid(f"a pattern of {field} is too long or repeats too much", field)
        try:
            patterns.append((re.compile(rf"(.*\.)?({pattern})$"), read(value, field)))
        except re.error as error:
            raise invalid(f"{field} has a pattern that is no expression", field) from error
    return patterns


class _Names(NamedTuple):
    """A module of the base, and the names of its A and B."""

    module: str
    tensors: dict[str, str]


def _places(tensors: Collection[str], shapes: Collection[Projection]) -> dict[Projection, _Names]:
    """Group the names of tensors by projection; raises for one that the engine has not."""
    found: dict[Projection, _Names] = {}
    targets, layers = {target for _, target in shapes}, 1 + max(layer for layer, _ in shapes)
    for name in tensors:
        match = _NAME.fullmatch(name)
        if match is None or match[3] not in LORA_TARGETS:
            raise invalid(f"tensor {name} has no place in an engine", name)
        if match[3] not in targets:
            raise no_place(name)
        layer, kind = int(match[2]), match[4]
        if layer >= layers:
            raise invalid(f"{name} is of another base: this model has {layers} layers", name)
        names = found.setdefault((layer, match[3]), _Names(match[1], {})).tensors
        if kind in names:
            raise invalid(f"{name} is there twice, as {names[kind]} as well", name)
        names[kind] = name
    if not found:
        raise invalid(f"{PEFT_TENSORS} holds no adapter", PEFT_TENSORS)
    return found


class _Reader(NamedTuple):
    """Reader of the stored tensors as factors of a product."""

    file: TensorFile
    scaling: _Scaling
    dtype: np.dtype[Any]

    def part(self, names: _Names, shape: tuple[int, int]) -> LowRank:
        if len(names.tensors) == 1:
            ((kind, name),) = names.tensors.items()
            raise invalid(f"{name} is there without its lora_{'B' if kind == 'A' else 'A'}", name)
        width, size = shape
        rank, scale = self.scaling.of(names.module)
        return LowRank(
            self._matrix(names.tensors["A"], (rank, width), 1.0),
            self._matrix(names.tensors["B"], (size, rank), scale),
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


RECORD_FILE = "adapter.json"
TENSORS_FILE = "adapter.safetensors"
_RECORD_LIMIT = 1 << 20


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Record of a stored adapter: `adapter.json`.

    `base` is the name of the model that it was trained for, `source` the folder that it came from.
    `shapes` is a digest of the base's projections and the engine's type, `sha256` that of
    `adapter.safetensors`, which has so many `bytes`.
    """

    version: Literal[1] = 1
    rank: int
    base: str
    source: str
    shapes: str
    bytes: int
    sha256: str


def store_adapter(source: Path, config: LLMEngineRunnerConfig, target: Path) -> AdapterRecord:
    """Check an adapter of PEFT's for an engine and keep it in `target`, which appears whole.

    The files are the owner's alone. Raises `adapter_invalid` and `unsupported_option` as
    `read_peft` does, and `invalid_value` where `target` is there already or cannot be written.
    """
    adapter = read_peft(source, config)
    data = save(
        {
            name: matrix
            for place, part in sorted(adapter.parts.items())
            for name, matrix in zip(_names(place), part, strict=True)
        }
    )
    record = AdapterRecord(
        rank=adapter.rank,
        base=adapter.base,
        source=str(source.resolve()),
        shapes=_shapes_digest(config),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    with fresh_folder(target) as folder:
        folder.chmod(0o700)
        _write(folder / TENSORS_FILE, data)
        _write(folder / RECORD_FILE, msgspec.json.encode(record))
    return record


def read_record(folder: Path) -> AdapterRecord:
    """Read the record of a stored adapter; raises `adapter_invalid`."""
    path = folder / RECORD_FILE
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_RECORD_LIMIT), type=AdapterRecord)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        what = f"{path} is missing or damaged: remove the adapter and add it again"
        raise invalid(what, RECORD_FILE) from error


def read_adapter(folder: Path, config: LLMEngineRunnerConfig) -> Adapter:
    """Read an adapter, as Hearth stored it or as PEFT saved it, and check that it fits an engine.

    It touches no device, so any thread may. Raises `adapter_invalid` naming the file, field or
    tensor, and `unsupported_option` where the engine takes none.
    """
    if not (folder / RECORD_FILE).exists():
        return read_peft(folder, config)
    record = read_record(folder)
    check_rank(record.rank, config)
    if record.shapes != _shapes_digest(config):
        what = "the adapter was stored for an engine of another shape or type: add it again"
        raise invalid(what, "shapes")
    _check_file(folder / TENSORS_FILE, record)
    with closing(TensorFile(folder / TENSORS_FILE, "adapter_invalid")) as file:
        parts = _stored_parts(folder, file, record.rank, config)
    return Adapter(record.rank, record.base, record.sha256, parts)


def _stored_parts(
    folder: Path, file: TensorFile, rank: int, config: LLMEngineRunnerConfig
) -> dict[Projection, LowRank]:
    parts = {}
    for place, (width, size) in projection_shapes(config).items():
        names = [name for name in _names(place) if name in file.tensors]
        shapes = [file.tensors[name].shape for name in names]
        own = min(rank, shapes[0][-1]) if names else 0
        if names and shapes != [(width, own), (own, size)]:
            raise _damaged(folder / TENSORS_FILE)
        if names:
            parts[place] = LowRank(*map(file.read, names))
    if rank != max((part.a.shape[1] for part in parts.values()), default=rank):
        raise _damaged(folder / TENSORS_FILE)
    known = {name for place in parts for name in _names(place)}
    for name in file.tensors:
        if name not in known:
            raise no_place(name)
    return parts


def adapter_folders(folder: Path) -> dict[str, Path]:
    """The adapters of a folder by their names, none where there is no folder.

    Raises `invalid_value` where it cannot be read.
    """
    try:
        return {path.name: path for path in sorted(folder.iterdir()) if _is_adapter(path)}
    except FileNotFoundError:
        return {}
    except OSError as error:
        what = f"{folder} cannot be read ({error.strerror})"
        raise HearthError("invalid_value", what, "adapters") from error


def load_all(folder: Path, load: Callable[[str, Path], None]) -> dict[str, HearthError]:
    """Load every adapter of a folder; those that cannot be served, and why.

    Raises `invalid_value` where the folder cannot be read, and `device_lost`.
    """
    refused: dict[str, HearthError] = {}
    for name, path in adapter_folders(folder).items():
        try:
            load(name, path)
        except HearthError as error:  # noqa: PERF203 - a folder is read in each turn
            if error.code == "device_lost":
                raise
            refused[name] = error
    return refused


def tensor_bytes(folder: Path) -> int:
    """Bytes of an adapter's tensors, by its files; 0 for one that will be refused."""
    sizes = ((folder / name).stat for name in (TENSORS_FILE, PEFT_TENSORS))
    for size in sizes:
        with suppress(OSError):
            return size().st_size
    return 0


def _is_adapter(path: Path) -> bool:
    # Others are on their way into the folder.
    return path.is_dir() and not path.name.startswith(".")


def _check_file(path: Path, record: AdapterRecord) -> None:
    try:
        same = path.stat().st_size == record.bytes and file_digest(path) == record.sha256
    except OSError:
        same = False
    if not same:
        raise _damaged(path)


def _damaged(path: Path) -> HearthError:
    what = f"{path} is missing or was changed: remove the adapter and add it again"
    return invalid(what, path.name)


def _names(place: Projection) -> tuple[str, str]:
    layer, target = place
    return f"lora_a_{target}_{layer}", f"lora_b_{target}_{layer}"


def _shapes_digest(config: LLMEngineRunnerConfig) -> str:
    heads = (config.num_attention_heads, config.num_kv_heads, config.head_dim)
    sizes = (config.num_decoder_layers, config.hidden_size, config.intermediate_size, *heads)
    return hashlib.sha256(repr((config.dtype, sizes)).encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    path.touch(0o600)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
