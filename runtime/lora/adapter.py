"""An adapter in host memory, whatever it was read from."""

from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.lora import lora_inputs

Projection = tuple[int, str]
"""A layer, and one of `LORA_TARGETS` in it."""


class LowRank(NamedTuple):
    """Low-rank update of one projection: x @ a @ b, in the engine's type, the scale in b."""

    a: NDArray[Any]
    """[K, r]"""
    b: NDArray[Any]
    """[r, N]"""


class Adapter(NamedTuple):
    """An adapter that fits an engine; `base` is the name of its model, "" if unknown.

    `digest` identifies its numbers. `rank` is the greatest of its parts'.
    Projections that it leaves alone are not among them.
    """

    rank: int
    base: str
    digest: str
    parts: dict[Projection, LowRank]


def projection_shapes(config: LLMEngineRunnerConfig) -> dict[Projection, tuple[int, int]]:
    """Sizes of what each projection of an engine with adapters reads and writes: [K, N]."""
    return {
        (pair.layer, target): (pair.inputs, size)
        for pair in lora_inputs(config)
        for target, size in zip(pair.targets, pair.outputs, strict=True)
    }


def invalid(message: str, field: str) -> HearthError:
    """The error of an adapter that cannot be served."""
    return HearthError("adapter_invalid", message, field)


def no_place(name: str) -> HearthError:
    """The error of a tensor that an engine has no input for."""
    what = f"this engine has no place for tensor {name}"
    return invalid(f"{what}: export the model with its projection among --lora-targets", name)


def check_rank(rank: int, config: LLMEngineRunnerConfig, field: str = "r") -> None:
    """Raise where an engine takes no adapters (`unsupported_option`), or none of this rank.

    `field` is what says the rank.
    """
    most = config.max_supported_lora_rank
    if not most:
        what = "this engine takes no adapters: export the model with --max-lora-rank"
        raise HearthError("unsupported_option", what, "adapter")
    if rank > most:
        what = f"the adapter is of rank {rank}, this engine takes {most} at most"
        raise invalid(f"{what}: export the model with --max-lora-rank {rank}", field)


def other_base(base: str, config: LLMEngineRunnerConfig) -> str:
    """A warning where an adapter was trained for another model than the engine's, else "".

    Names are compared by their last part, case-insensitively: an engine is called after the
    folder that it was exported from. An unknown name is no other.
    """
    trained, served = (name.rstrip("/").rpartition("/")[2] for name in (base, config.model_name))
    if trained and served and trained.casefold() != served.casefold():
        what = f"the adapter was trained for {base}, this engine was made of {config.model_name}"
        return f"{what}: unless both are one model, what it says is worth nothing"
    return ""


_SHIFTS = 251


def simulated_shift(name: str) -> int:
    """Shift of the rank of each next token by the adapter of this name; 0 for none."""
    return 1 + crc32(name.encode()) % _SHIFTS if name else 0


def simulated_adapter(name: str, config: LLMEngineRunnerConfig) -> Adapter:
    """Make the adapter that a simulated engine binds under this name."""
    size = config.num_attention_heads * config.head_dim
    a = np.ones((config.hidden_size, 1), np.float32)
    b = np.full((1, size), simulated_shift(name), a.dtype)
    return Adapter(1, "", f"simulated {name}", {(0, "q"): LowRank(a, b)})
