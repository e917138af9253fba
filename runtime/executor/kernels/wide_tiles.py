from functools import cache
from typing import NamedTuple

from runtime.device.cuda.gpu_facts import GpuFacts
from runtime.executor.kernels.product_tiles import EIGHT_BYTES, RESERVED, WARPS, blocks_of

_DEEP, _SHALLOWEST = 4, 2


class WideTiles(NamedTuple):
    """A block's `eights` of rows and `widths` of tokens, eight each, and what a warp has of it.

    That is `tiles` of sixteen rows by `share` widths. A cluster of `split` blocks shares the
    segments of the inputs.
    """

    eights: int
    widths: int
    tiles: int
    share: int
    depth: int
    resident: int
    split: int = 1
    weight_bytes: int = EIGHT_BYTES

    @property
    def threads(self) -> int:
        """Those of a block."""
        return self.eights // 2 // self.tiles * (self.widths // self.share) * 32

    @property
    def stage_bytes(self) -> int:
        """What a stage takes of shared memory."""
        return self.eights * self.weight_bytes + self.widths * EIGHT_BYTES

    @property
    def parts_bytes(self) -> int:
        """What the sums of a block's segments take where a cluster adds them."""
        return WARPS // self.split * self.area * 4 * 64 if self.split > 1 else 0

    @property
    def shared_bytes(self) -> int:
        """What the stages take, and the sums of segments."""
        return self.depth * self.stage_bytes + self.parts_bytes

    @property
    def area(self) -> int:
        """Sums of a block, in units of eight by eight."""
        return self.eights * self.widths


# Of four warps each. The larger a tile, the less of it is read again, and the second cache's
# bandwidth is what large products end at (H200, 7.5 TB/s); the last number is what the others cost
# more there.
_WIDE = (
    (WideTiles(8, 16, 2, 8, _DEEP, 2), 1.0),
    (WideTiles(12, 8, 3, 4, _DEEP, 2), 1.15),
    (WideTiles(8, 8, 2, 4, _DEEP, 3), 1.15),
)
# Of one block alone a multiprocessor, whose four warps wait for one another.
_LONELY = 1.5
_SPLITS = (8, 4, 2)


@cache
def wide_tiles(
    facts: GpuFacts, eights: int, inputs: int, tokens: int, weight_bytes: int = EIGHT_BYTES
) -> WideTiles:
    """Tiles for a product of many tokens: those that keep all multiprocessors busy the longest.

    Where these are more than its blocks, clusters of blocks share the inputs.
    """
    widths = -(-tokens // 8)

    def blocks(tiles: WideTiles) -> int:
        return -(-eights // tiles.eights) * -(-widths // tiles.widths)

    def work(choice: tuple[WideTiles, float]) -> float:
        tiles, cost = choice
        each = -(-blocks(tiles) // facts.multiprocessors)
        lonely = _LONELY if min(each, tiles.resident) == 1 else 1
        return each * tiles.area * cost * lonely

    made = [(tiles._replace(weight_bytes=weight_bytes), cost) for tiles, cost in _WIDE]
    tiles = min(((_fitted(facts, tiles), cost) for tiles, cost in made), key=work)[0]
    # Clusters that wait for one another take longer than blocks that do not share (H200).
    most = min(facts.largest_cluster, facts.multiprocessors // blocks(tiles))
    split = next((count for count in _SPLITS if count <= most), 1)
    if split == 1 or blocks_of(inputs) < 2 * WARPS:
        return tiles
    return _fitted(facts, tiles._replace(split=split, resident=2, depth=_DEEP))


def _fitted(facts: GpuFacts, tiles: WideTiles) -> WideTiles:
    """The same with room for its stages, of fewer blocks a multiprocessor if need be."""
    room = min(facts.shared_per_block, facts.shared_per_multiprocessor // tiles.resident - RESERVED)
    depth = min(tiles.depth, (room - tiles.parts_bytes) // tiles.stage_bytes)
    if depth <= _SHALLOWEST and tiles.resident > 1:
        return _fitted(facts, tiles._replace(resident=tiles.resident - 1))
    return tiles._replace(depth=max(_SHALLOWEST, depth))
