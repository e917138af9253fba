"""A file of external weights: tensors in the safetensors format, and whose they are."""

import json
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from hearth.runtime.config import RopeConfig
from hearth.runtime.device.mapped_tensors import read_header
from hearth.runtime.engine_folder import LAYOUT_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.files import record_digest

EMBEDDING = "embedding"

StoredType = Literal["F32", "F16", "BF16", "I8", "U8"]


class WeightEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Type, shape and place in bytes from the file's beginning; of int4 it is two in a byte."""

    dtype: StoredType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of a model that its graph contains, the same for all weights that share the engine."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rms_norm_eps: float
    tied_head: bool
    attention_bias: bool
    qk_norm: bool
    rope: RopeConfig
    output_bias: bool = False
    mlp_bias: bool = False


class WeightLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`weights.json`: the tensors of every file that the engine takes.

    `head` is the one that gives the logits: the embedding table, or one of its own. An engine of
    which they are `bound` has them as inputs, any other as initializers. `own` is the digest of the
    data of the folder's own file.
    """

    begin: int
    head: str
    bound: bool
    tensors: dict[str, WeightEntry]
    model: ModelFacts
    own: str = ""

    @property
    def taken(self) -> dict[str, WeightEntry]:
        """Tensors that the graph reads; a separate embedding table is read by the runtime."""
        return {
            name: entry
            for name, entry in self.tensors.items()
            if name != EMBEDDING or self.head == EMBEDDING
        }

    @property
    def end(self) -> int:
        """Bytes of a file."""
        return max((one.offset + one.nbytes for one in self.tensors.values()), default=self.begin)


def load_layout(folder: Path) -> WeightLayout:
    """Read the list of an engine folder; raises `engine_corrupt`."""
    try:
        return msgspec.json.decode((folder / LAYOUT_FILE).read_bytes(), type=WeightLayout)
    except (OSError, msgspec.MsgspecError) as error:
        raise HearthError(
            "engine_corrupt", f"{LAYOUT_FILE} cannot be read: export the model again", LAYOUT_FILE
        ) from error


def write_layout(folder: Path, layout: WeightLayout) -> None:
    """Write the list into an engine folder."""
    (folder / LAYOUT_FILE).write_bytes(msgspec.json.encode(layout))


FORMAT = "hearth-weights-1"


class WeightsNote(msgspec.Struct, frozen=True, kw_only=True):
    """Head of the file: source of the weights, digest of its data, the known answer."""

    format: str
    source: str
    sha256: str
    answer: str


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class WeightsFile(NamedTuple):
    """The head of a file that fits an engine."""

    path: Path
    note: WeightsNote
    nbytes: int


def open_weights(path: Path, layout: WeightLayout) -> WeightsFile:
    """Compare the head of a file with what the engine takes.

    Raises `weights_invalid` naming the file, or the first tensor that is missing, that nothing
    would read, or that is of another type, shape or place.
    """
    try:
        header, begin = read_header(path)
        note = msgspec.json.decode(header.pop("__metadata__"), type=WeightsNote)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise _invalid(path.name, f"there is no {path}") from error
    except (OSError, KeyError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise _invalid(path.name, f"{path} is no file of external weights") from error
    if note.format != FORMAT:
        raise _invalid(path.name, f"{path} is of another version of Hearth")
    for name, wanted in layout.tensors.items():
        entry = entries.pop(name, None)
        if entry is None:
            raise _invalid(name, f"{path.name} lacks the tensor {name}, which the engine takes")
        if (entry.dtype, entry.shape) != (wanted.dtype, wanted.shape):
            raise _invalid(
                name,
                f"{name} of {path.name} is {entry.dtype} {list(entry.shape)}, the engine takes "
                f"{wanted.dtype} {list(wanted.shape)}",
            )
        if (begin + entry.data_offsets[0], begin + entry.data_offsets[1]) != (
            wanted.offset,
            wanted.offset + wanted.nbytes,
        ):
            raise _invalid(name, f"{name} of {path.name} does not lie where the engine reads it")
    for name in entries:
        raise _invalid(name, f"{path.name} holds a tensor {name}, which the engine does not take")
    if size != layout.end:
        raise _invalid(path.name, f"{path} has {size} bytes instead of {layout.end}")
    return WeightsFile(path, note, size)


def write_head(path: Path, layout: WeightLayout, source: str, answer: bytes) -> str:
    """Write the head of a file whose data are there; gives the digest of the data."""
    sha256 = record_digest(path, begin=layout.begin)
    note = WeightsNote(format=FORMAT, source=source, sha256=sha256, answer=answer.decode())
    header: dict[str, object] = {"__metadata__": msgspec.to_builtins(note)}
    for name, entry in layout.tensors.items():
        first = entry.offset - layout.begin
        header[name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (first, first + entry.nbytes),
        }
    text = json.dumps(header).encode()
    head_bytes = layout.begin - 8
    if len(text) > head_bytes:
        raise HearthError("internal", f"the head of {path.name} has {len(text)} bytes", path.name)
    with path.open("r+b") as file:
        file.write(head_bytes.to_bytes(8, "little") + text.ljust(head_bytes))
    return sha256


def _invalid(field: str, what: str) -> HearthError:
    return HearthError(
        "weights_invalid", f"{what}: write the file again with hearth weights", field
    )
