"""What adapters add to products: x A by a kernel of its own, the rest in the product itself."""

import ctypes
from math import ceil
from typing import NamedTuple

from runtime.config import DType
from runtime.device.cuda.launch import addresses, integers
from runtime.executor.kernels.launch import Kernels, Launch

_BLOCK = 256
_COLUMNS, _MOST_TOKENS = 8, 8


class Added(NamedTuple):
    """What an adapter adds to a product: for each token x A, of which the product makes x A B.

    `shrunk` float32 [T, width] has `most` columns for each matrix of the product, of which the
    first `rank` (int32, read on the device) are there; `b` [width, rows of all matrices] has the
    rows of a matrix in its own columns alone.
    """

    shrunk: int
    b: int
    rank: int
    width: int
    most: int


class ShrinkArguments(ctypes.Structure):
    """`Shrink` of source/shrink.cu."""

    _fields_ = (
        *addresses("x gain a rank out"),
        ("eps", ctypes.c_float),
        *integers("tokens width most"),
    )


class Shrink:
    """Launches of x A, for as many columns as the active adapter has."""

    def __init__(self, programs: Kernels, dtype: DType) -> None:
        self._programs = programs
        self._bfloat = int(dtype == "bfloat16")

    def launch(
        self,
        x: int,
        a: int,
        added: Added,
        shape: tuple[int, int],
        norm: tuple[int, float] | None = None,
    ) -> Launch:
        """The product of x and A, where `shape` is (inputs, tokens) and A [inputs, width].

        Tokens are elements, or float32 where they are to be normed by a gain and its eps.
        """
        inputs, tokens = shape
        together = next(size for size in (1, 2, 4, 8) if size >= min(tokens, _MOST_TOKENS))
        gain, eps = norm or (0, 0.0)
        arguments = ShrinkArguments(
            x, gain, a, added.rank, added.shrunk, eps, tokens, added.width, added.most
        )
        macros = {"INPUTS": inputs, "NORMED": int(norm is not None), "TOKENS": together}
        function = self._programs.kernel("shrink", "shrink", macros | {"BFLOAT": self._bfloat})
        grid = (added.width // _COLUMNS, ceil(tokens / together), 1)
        return Launch(function, grid, _BLOCK, 0, arguments, "shrink")
