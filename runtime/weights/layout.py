"""Which tensors an engine takes from a file of external weights, and where they lie there."""

from pathlib import Path
from typing import Literal

import msgspec

from runtime.config import RopeConfig
from runtime.engine_folder import LAYOUT_FILE
from runtime.errors import HearthError

EMBEDDING = "embedding"

StoredType = Literal["F32", "F16", "BF16", "I8", "U8"]


class WeightEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Type, shape and place in bytes from the file's beginning; of int4 it is two in a byte."""

    dtype: StoredType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a model is in the graph itself, so that all who share the engine have it alike."""

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
        """Those that the graph reads; an embedding table of its own is read by the runtime."""
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
