from functools import cache
from typing import NamedTuple

from runtime.executor.kernels.launch import GpuFacts
from runtime.executor.kernels.product_tiles import EIGHT_BYTES, RESERVED

_CAPABILITY = (9, 0)
_GROUP, _SEGMENTS, _BLOCK = 8, 8, 64
_BARRIER_BYTES = 128


class GroupTiles(NamedTuple):
    """A block's `eights` of rows and `widths` of tokens, eight each, through `depth` stages.

    Four warps together have eight of the eights; `shares` of such groups share the inputs, and four
    more warps fill the stages. A multiprocessor has room for `resident` blocks.
    """

    eights: int
    widths: int
    depth: int
    resident: int = 1
    shares: int = 1

    @property
    def threads(self) -> int:
        """Those of a block."""
        return (self.eights // _GROUP * self.shares + 1) * 128

    @property
    def shared_bytes(self) -> int:
        """What stages take, the sums of segments where these are shared, and barriers."""
        parts = _SEGMENTS * self.area * 4 * 64 if self.shares > 1 else 0
        return self.depth * (self.eights + self.widths) * EIGHT_BYTES + parts + _BARRIER_BYTES

    @property
    def area(self) -> int:
        """Sums of a block, in units of eight by eight."""
        return self.eights * self.widths


SHAPES = (
    GroupTiles(24, 16, 5),
    GroupTiles(16, 16, 6),
    GroupTiles(8, 16, 4, 2),
    GroupTiles(8, 8, 6, 1, 2),
)
# What a block takes beside its sums, for each eight of rows and tokens that it reads.
_READING = 8
# Fewer tokens than that are faster by tiles that warps have alone (H200).
_FEWEST = 257


@cache
def group_tiles(
    facts: GpuFacts, rows: tuple[int, ...], inputs: int, tokens: int, *, gated: bool
) -> GroupTiles | None:
    """Tiles of a product of many tokens by four warps together; None where it has none.

    The rows of four warps are of one matrix, or of gate and up where these are `gated`.
    """
    whole = gated or all(count % (8 * _GROUP) == 0 for count in rows[:-1])
    if facts.capability != _CAPABILITY or tokens < _FEWEST or inputs % _BLOCK or not whole:
        return None
    eights, widths = sum(-(-count // 8) for count in rows), -(-tokens // 8)

    def work(tiles: GroupTiles) -> int:
        blocks = -(-eights // tiles.eights) * -(-widths // tiles.widths)
        each = tiles.area + _READING * (tiles.eights + tiles.widths)
        return -(-blocks // facts.multiprocessors) * each

    return min((one for one in SHAPES if _fits(facts, one, inputs)), key=work, default=None)


def _fits(facts: GpuFacts, tiles: GroupTiles, inputs: int) -> bool:
    if inputs // _BLOCK % tiles.shares:
        return False
    room = facts.shared_per_multiprocessor // tiles.resident - RESERVED
    return tiles.shared_bytes <= min(room, facts.shared_per_block)
