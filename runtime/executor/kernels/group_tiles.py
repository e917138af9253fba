from functools import cache
from typing import NamedTuple

from runtime.device.cuda.gpu_facts import GpuFacts
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


class _Measured(NamedTuple):
    """Tiles, and what 64 inputs take: of one block a multiprocessor, and of all that fit (H200)."""

    tiles: GroupTiles
    alone_us: float
    full_us: float


SHAPES = (
    _Measured(GroupTiles(24, 16, 5), 0.75, 0.75),
    _Measured(GroupTiles(16, 16, 6), 0.62, 0.62),
    _Measured(GroupTiles(8, 16, 4, 2), 0.4, 0.6),
    _Measured(GroupTiles(8, 8, 6, 1, 2), 0.27, 0.27),
)
# Fewer tokens than that are faster by tiles that warps have alone (H200), those of one matrix by
# clusters that share its inputs.
_FEWEST, _FEWEST_OF_ONE = 257, 257


@cache
def group_tiles(
    facts: GpuFacts, rows: tuple[int, ...], inputs: int, tokens: int, *, gated: bool
) -> GroupTiles | None:
    """Tiles of a product of many tokens by four warps together; None where it has none.

    The rows of four warps are of one matrix, or of gate and up where these are `gated`.
    """
    whole = gated or all(count % (8 * _GROUP) == 0 for count in rows[:-1])
    fewest = _FEWEST_OF_ONE if len(rows) == 1 else _FEWEST
    if facts.capability != _CAPABILITY or tokens < fewest or inputs % _BLOCK or not whole:
        return None
    eights, widths = sum(-(-count // 8) for count in rows), -(-tokens // 8)

    def work(shape: _Measured) -> float:
        tiles = shape.tiles
        blocks = -(-eights // tiles.eights) * -(-widths // tiles.widths)
        full, left = divmod(-(-blocks // facts.multiprocessors), tiles.resident)
        return full * shape.full_us + (shape.alone_us if left else 0)

    fitting = [one for one in SHAPES if _fits(facts, one.tiles, inputs)]
    return min(fitting, key=work).tiles if fitting else None


def _fits(facts: GpuFacts, tiles: GroupTiles, inputs: int) -> bool:
    # A stage is always one share's, and shares are alike.
    if inputs // _BLOCK % tiles.shares or tiles.depth % tiles.shares:
        return False
    room = facts.shared_per_multiprocessor // tiles.resident - RESERVED
    return tiles.shared_bytes <= min(room, facts.shared_per_block)
