"""What adapters add to products."""

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import ceil
from typing import Any, NamedTuple

from runtime.device.cuda.launch import addresses, integers
from runtime.executor.kernels.launch import GpuFacts, Kernels, Launch

RANK_STEP = 16
"""Slots have room for a multiple of so many ranks, which one instruction multiplies."""
# With one block on a multiprocessor an H200 has room for 15 clusters of eight, not for 16.
_CLUSTER = 2
# Where a product takes more, the next one's blocks have no room beside it.
_SHARE = 0.7
_TOKENS = 8
_STAGE_BYTES = 2048
_WARPS = 8


class Adapter(NamedTuple):
    """What an adapter adds to a product, x A B: device addresses, and sizes in elements.

    Both lie transposed. A [width, inputs] has `most` rows, a multiple of RANK_STEP, for each matrix
    of the product, of which the first `rank` (int32, read on the device) are there; B [rows of all
    matrices, most]. `shrunk` gets x A, float32 [tokens, width], where a launch of its own finds it.
    """

    a: int
    b: int
    rank: int
    shrunk: int
    width: int
    most: int


class AddedArguments(ctypes.Structure):
    """`Added` of source/added.cuh."""

    _fields_ = (*addresses("shrunk a b rank"), *integers("width most"))


def added_arguments(adapter: Adapter) -> AddedArguments:
    """What a product needs of an adapter."""
    return AddedArguments(
        adapter.shrunk, adapter.a, adapter.b, adapter.rank, adapter.width, adapter.most
    )


class ShrinkArguments(ctypes.Structure):
    """`Shrink` of source/shrink.cu."""

    _fields_ = (*addresses("x a rank out"), *integers("tokens width most unused"))


class Shrink:
    """Launches of x A by itself, for as many columns as the active adapter has."""

    def __init__(self, programs: Kernels, *, bfloat: int) -> None:
        self._programs = programs
        self._bfloat = bfloat
        self._functions: dict[int, Any] = {}

    def launch(self, x: int, adapter: Adapter, inputs: int, tokens: int) -> Launch:
        """The product of elements x [tokens, inputs] and A."""
        if inputs not in self._functions:
            macros = {"INPUTS": inputs, "BFLOAT": self._bfloat}
            self._functions[inputs] = self._programs.kernel("shrink", "shrink", macros)
        arguments = ShrinkArguments(
            x, adapter.a, adapter.rank, adapter.shrunk, tokens, adapter.width, adapter.most
        )
        grid = (adapter.width // RANK_STEP, ceil(tokens / _TOKENS), 1)
        return Launch(self._functions[inputs], grid, 32 * _WARPS, 0, arguments, "shrink")


class ShrinkTiles(NamedTuple):
    """How clusters of blocks multiply by A beside a product.

    A cluster has rows of up to `parts` matrices, each of `most` ranks.
    """

    cluster: int
    parts: int
    most: int
    shared_bytes: int


def shrink_tiles(
    adapter: Adapter, rows: Sequence[int], eights: int, blocks: int, *, apart: bool
) -> ShrinkTiles:
    """Tiles beside a product of matrices of `rows`, whose blocks have `eights` times eight of them.

    Its warps have `blocks` blocks of inputs; where a block's rows lie `apart` it has some of all.
    """
    ends, together = list(accumulate(rows)), 8 * eights * _CLUSTER
    spanned = (
        bisect_right(ends, min(first + together, ends[-1]) - 1) - bisect_right(ends, first) + 1
        for first in range(0, ends[-1], together)
    )
    parts = len(ends) if apart else max(spanned)
    ranks = _WARPS // _CLUSTER * parts * blocks * _STAGE_BYTES
    told = _WARPS * parts * RANK_STEP * _TOKENS * 4 + 16
    sums = _TOKENS * (parts * adapter.most + 4) * 4
    return ShrinkTiles(_CLUSTER, parts, adapter.most, ranks + eights * 256 + told + sums)


def has_room(facts: GpuFacts, shared: int) -> bool:
    """Whether a product takes so much shared memory, and leaves some for the next one's blocks."""
    most = min(facts.shared_per_block, int(_SHARE * facts.shared_per_multiprocessor))
    return facts.largest_cluster >= _CLUSTER and shared <= most
