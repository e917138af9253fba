"""Launches of a draft's step that are neither products nor attention (`csrc/decoder/draft.cu`)."""

import ctypes
from math import ceil
from typing import NamedTuple

from runtime.config import DType
from runtime.device.cuda.launch import Launch, addresses, integers
from runtime.device.cuda.programs import Kernels

_BLOCK = 256
PART = 4096
"""Logits that one block takes: how a sum over them is cut follows from the vocabulary alone."""


class FuseArguments(ctypes.Structure):
    """`Fuse` of csrc/decoder/draft.cu."""

    _fields_ = (
        *addresses("x own embeds embedded_gain fused_gain inputs"),
        *integers("size given"),
        ("eps", ctypes.c_float),
    )


class SelectArguments(ctypes.Structure):
    """`Select` of csrc/decoder/draft.cu."""

    _fields_ = (
        *addresses("x context last kept_x kept_context places"),
        *integers("seq_len select_len size width"),
    )


class ScoresArguments(ctypes.Structure):
    """`Scores` of csrc/decoder/draft.cu."""

    _fields_ = (*addresses("logits parts"), ("vocabulary", ctypes.c_int32))


class DraftConfig(NamedTuple):
    """`Config` of csrc/decoder/draft.cu."""

    bfloat: bool
    block: int = _BLOCK
    part: int = PART


class DraftPieces:
    """Elements are of the engine's `dtype`, x and logits float32; sizes in elements."""

    def __init__(self, programs: Kernels, dtype: DType) -> None:
        self._programs = programs
        self._config = DraftConfig(bfloat=dtype == "bfloat16")

    def fuse(  # noqa: PLR0917 (addresses and sizes, in the order of a step)
        self,
        x: int,
        own: int,
        embeds: int,
        gains: tuple[int, int],
        eps: float,
        inputs: int,
        size: int,
        tokens: int,
        *,
        given: bool,
    ) -> tuple[Launch, ...]:
        """Adds own to x [T, H], which is zero unless it is `given`.

        inputs [T, 2H] are embeds and x, normed with the two `gains`.
        """
        arguments = FuseArguments(x, own, embeds, *gains, inputs, size, int(given), eps)
        return (self._launch("fuse", (tokens, 1, 1), arguments),)

    def select(
        self,
        x: tuple[int, int, int],
        context: tuple[int, int, int],
        last: int,
        places: int,
        shape: tuple[int, int, int],
    ) -> tuple[Launch, ...]:
        """The selected tokens of x and context, each (from, to, width); shape is (rows, S, M).

        `last` [rows, M] int64 says which they are; `places` of the same shape gets zeros.
        """
        rows, seq_len, select_len = shape
        arguments = SelectArguments(
            x[0], context[0], last, x[1], context[1], places, seq_len, select_len, x[2], context[2]
        )
        return (self._launch("select", (rows * select_len, 1, 1), arguments),)

    def log_softmax(
        self, logits: int, parts: int, rows: int, vocabulary: int
    ) -> tuple[Launch, ...]:
        """Log-probabilities in place of logits [rows, vocabulary]; `parts` as `parts_bytes`."""
        arguments = ScoresArguments(logits, parts, vocabulary)
        grid = (ceil(vocabulary / PART), rows, 1)
        return tuple(self._launch(name, grid, arguments) for name in ("measure", "normalise"))

    def _launch(self, name: str, grid: tuple[int, int, int], arguments: ctypes.Structure) -> Launch:
        function = self._programs.kernel("decoder/draft", name, self._config)
        return Launch(function, grid, _BLOCK, 0, arguments, name)


def parts_bytes(rows: int, vocabulary: int) -> int:
    """Scratch memory of `DraftPieces.log_softmax`."""
    return rows * ceil(vocabulary / PART) * 8
