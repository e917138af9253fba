"""An adapter as Hearth keeps it: checked once, in the engine's type, with a digest."""

import hashlib
import os
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

import msgspec
from safetensors.numpy import save

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.mapped_tensors import TensorFile
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
from hearth.runtime.lora.peft import PEFT_TENSORS, read_peft

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
