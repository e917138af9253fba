"""What adapters add to products: x A by a kernel of its own, the rest in the product itself."""

import ctypes
from math import ceil
from typing import Any, NamedTuple

from runtime.device.cuda.launch import addresses, integers
from runtime.executor.kernels.launch import Kernels, Launch

_BLOCK = 256
_COLUMNS, _MOST_TOKENS = 8, 8


class Adapter(NamedTuple):
    """What an adapter adds to a product, x A B: device addresses, and sizes in elements.

    A [inputs, width] has `most` columns, a multiple of 8, for each matrix of the product, of which
    the first `rank` (int32, read on the device) are there; B [width, rows of all matrices] has a
    matrix's rows in its own columns alone. `shrunk` gets x A, float32 [tokens, width].
    """

    a: int
    b: int
    rank: int
    shrunk: int
    width: int
    most: int


class AddedArguments(ctypes.Structure):
    """`Added` of source/added.cuh."""

    _fields_ = (*addresses("shrunk b rank"), *integers("width most"))


def added_arguments(adapter: Adapter) -> AddedArguments:
    """What a product needs of an adapter."""
    return AddedArguments(adapter.shrunk, adapter.b, adapter.rank, adapter.width, adapter.most)


class ShrinkArguments(ctypes.Structure):
    """`Shrink` of source/shrink.cu."""

    _fields_ = (
        *addresses("x gain a rank out"),
        ("eps", ctypes.c_float),
        *integers("tokens width most"),
    )


class Shrink:
    """Launches of x A, for as many columns as the active adapter has."""

    def __init__(self, programs: Kernels, *, bfloat: int) -> None:
        self._programs = programs
        self._bfloat = bfloat
        self._functions: dict[tuple[int, ...], Any] = {}

    def launch(
        self,
        x: int,
        adapter: Adapter,
        shape: tuple[int, int],
        norm: tuple[int, float] | None = None,
    ) -> Launch:
        """The product of x and A, where `shape` is (inputs, tokens).

        Tokens are elements, or float32 where they are to be normed by a gain and its eps.
        """
        inputs, tokens = shape
        together = next(size for size in (1, 2, 4, 8) if size >= min(tokens, _MOST_TOKENS))
        numbers = (inputs, int(norm is not None), together)
        function = self._functions.get(numbers)
        if function is None:
            macros = dict(zip(("INPUTS", "NORMED", "TOKENS"), numbers, strict=True))
            function = self._programs.kernel("shrink", "shrink", {**macros, "BFLOAT": self._bfloat})
            self._functions[numbers] = function
        gain, eps = norm or (0, 0.0)
        arguments = ShrinkArguments(
            x, gain, adapter.a, adapter.rank, adapter.shrunk, eps, tokens, adapter.width,
            adapter.most,
        )  # fmt: skip
        grid = (adapter.width // _COLUMNS, ceil(tokens / together), 1)
        return Launch(function, grid, _BLOCK, 0, arguments, "shrink")
