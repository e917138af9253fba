"""Arguments and launches of the low-rank part of products."""

import ctypes
from math import ceil
from typing import Any, NamedTuple

from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.launch import Launch, addresses, integers
from hearth.runtime.device.cuda.programs import Kernels
from hearth.runtime.executor.kernels.product_tiles import NarrowTiles

RANK_STEP = 16
"""Ranks that one instruction multiplies; the rank of a slot is padded to a multiple."""
_TOKENS = 8
# A stage has sixteen ranks of A and 64 inputs.
_STAGE_BYTES = 2048
_WARPS = 8
# Blocks of a product get more shared memory where fewer would fit.
_LEAST_STAGES = 6


class Adapter(NamedTuple):
    """Low-rank part of a product, x A B: device addresses, and sizes in elements.

    Both lie transposed. A [width, inputs] has `most` rows, a multiple of RANK_STEP, for each matrix
    of the product, of which the first `rank` (int32, read on the device) are there; B [rows of all
    matrices, most]. `shrunk` gets x A, float32 [tokens, width], if a launch of its own computes it.
    """

    a: int
    b: int
    rank: int
    shrunk: int
    width: int
    most: int


class MailboxBuffers(NamedTuple):
    """Buffers of x A between blocks of a product: `place`, float32 [tokens, width].

    The next product uses `cleared`, whose `numbers` elements this one resets to the empty marker.
    """

    place: int
    cleared: int
    numbers: int


class ShrinkBlocks(NamedTuple):
    """Number of `blocks` that multiply by A, stages that they prefetch, bytes of a block."""

    blocks: int
    stages: int
    shared_bytes: int


class AddedArguments(ctypes.Structure):
    """`Added` of csrc/lora/added.cuh."""

    _fields_ = (*addresses("shrunk a b rank cleared"), *integers("width most numbers blocks"))


def added_arguments(
    adapter: Adapter, mailbox: MailboxBuffers | None, blocks: int
) -> AddedArguments:
    """Make the adapter's arguments of a product.

    x A comes from `blocks` of the product itself through `mailbox`, or from an earlier launch.
    """
    place, cleared, numbers = mailbox or (adapter.shrunk, 0, 0)
    given = (adapter.a, adapter.b, adapter.rank)
    return AddedArguments(place, *given, cleared, adapter.width, adapter.most, numbers, blocks)


class ShrinkConfig(NamedTuple):
    """`Config` of csrc/lora/shrink.cu."""

    bfloat: bool
    inputs: int


class ShrinkArguments(ctypes.Structure):
    """`Shrink` of csrc/lora/shrink.cu."""

    _fields_ = (*addresses("x a rank out"), *integers("tokens width most unused"))


class Shrink:
    """Launches of x A by itself, for as many columns as the active adapter has."""

    def __init__(self, programs: Kernels, *, bfloat: bool) -> None:
        self._programs = programs
        self._bfloat = bfloat
        self._functions: dict[int, Any] = {}

    def launch(self, x: int, adapter: Adapter, inputs: int, tokens: int) -> Launch:
        """Make the launch of the product of elements x [tokens, inputs] and A."""
        if inputs not in self._functions:
            config = ShrinkConfig(self._bfloat, inputs)
            self._functions[inputs] = self._programs.kernel("lora/shrink", "shrink", config)
        arguments = ShrinkArguments(
            x, adapter.a, adapter.rank, adapter.shrunk, tokens, adapter.width, adapter.most
        )
        grid = (adapter.width // RANK_STEP, ceil(tokens / _TOKENS), 1)
        return Launch(self._functions[inputs], grid, 32 * _WARPS, 0, arguments, "shrink")


class LoraMailbox:
    """Double buffer in which blocks of a step's products pass x A on: float32 [tokens, width].

    An element that is not written yet is a NaN (csrc/lora/added.cuh). Each product resets the
    other buffer; the first buffer is reset before the step's first product.
    """

    def __init__(self) -> None:
        self._places = [0, 0]
        self._numbers = 0

    def use(self, address: int, tokens: int, width: int) -> tuple[int, int]:
        """Begin a step whose two buffers lie at `address`, one behind the other.

        Returns address and number of elements that must be reset before the first product; both 0
        for more tokens than the mailbox serves.
        """
        self._numbers = tokens * width if tokens <= _TOKENS else 0
        self._places = [address + 4 * self._numbers, address]
        return (address, self._numbers) if self._numbers else (0, 0)

    def next(self) -> MailboxBuffers:
        """Swap the buffers, and return them for the next product of a step."""
        self._places.reverse()
        place, cleared = self._places
        return MailboxBuffers(place, cleared, self._numbers)


def shrink_blocks(
    facts: GpuFacts, adapter: Adapter, tiles: NarrowTiles, *, matrices: int, ring: int, blocks: int
) -> ShrinkBlocks | None:
    """Plan the blocks of a product that multiply by A beside the others; None if they do not fit.

    They need multiprocessors of their own, so that all blocks of the grid are resident at once:
    those that the product leaves, or can do without where its blocks take groups in turn. A warp
    has `ring` bytes for weights, and `blocks` of inputs.
    """
    repeated = tiles.groups > tiles.blocks
    free = facts.multiprocessors - tiles.blocks
    if repeated:
        turns = -(-tiles.groups // max(1, facts.multiprocessors - matrices))
        free = facts.multiprocessors - -(-tiles.groups // turns)
    count = min(adapter.width // RANK_STEP, free) // matrices * matrices
    # The sums have a part more.
    shared = tiles.shared_bytes + (1 + repeated) * -(-tiles.eights // 2) * 512
    spare = (facts.shared_per_block - shared) // _WARPS + ring
    stages = min(blocks, max(_LEAST_STAGES, ring // _STAGE_BYTES), spare // _STAGE_BYTES)
    if not count or not stages or not facts.dependent:
        return None
    return ShrinkBlocks(count, stages, shared + _WARPS * max(0, stages * _STAGE_BYTES - ring))
