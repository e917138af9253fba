from functools import cache, partial
from typing import NamedTuple

from hearth.runtime.device.cuda.gpu_facts import GpuFacts

COLUMNS = (8, 16, 32, 64)
"""The numbers of tokens that narrow products are made for."""
WARPS = 8
EIGHT_BYTES = 1024
"""Bytes of eight rows of 64 elements in a stage, weights or activations."""
_MOST_HELD = 5
_MOST_EIGHTS = 6
_DEEPEST, _DEEP, _SHALLOWEST = 8, 4, 2
_FEW_COLUMNS = 16
# From here on a thread that norms is heavy.
_HEAVY_BLOCKS, _HEAVY_EIGHTS = 4, 5
_LARGE_SHARED = 200 << 10
# Sums that leave a thread registers: tiles of sixteen rows by eight tokens.
_MOST_FRAGMENTS = 24
RESERVED = 1024
"""Shared memory of a multiprocessor that each block takes beside its own."""
_PART_BYTES = 16 * 32


class NarrowTiles(NamedTuple):
    """Partition of a narrow product over blocks.

    A block has `eights` times eight rows at a time and `depth` stages of a ring for each warp;
    `blocks` take `groups` of these in turn, for each `columns` tokens of a step. `resident` is the
    number of blocks a multiprocessor that the compiler keeps registers for.
    """

    columns: int
    eights: int
    depth: int
    groups: int
    blocks: int
    resident: int
    shared_bytes: int
    token_stages: int = 0
    padding: int = 0
    """Shared memory more, so that a multiprocessor takes one block and not two."""


def most_blocks(inputs: int) -> int:
    """Blocks of 64 inputs in the longest of the eight segments."""
    return -(-blocks_of(inputs) // WARPS)


def norms_itself(inputs: int, tokens: int) -> bool:
    """Return True if a product of `tokens` tokens norms its inputs, not a launch before it."""
    return tokens <= COLUMNS[0] and most_blocks(inputs) <= _MOST_HELD


def columns_for(tokens: int) -> int | None:
    """Columns of the narrow product for a step of `tokens`; None if the wide product takes it."""
    return next((columns for columns in COLUMNS if columns >= tokens), None)


@cache
def narrow_tiles(
    facts: GpuFacts,
    eights: int,
    inputs: int,
    columns: int,
    *,
    paired: bool,
    normed: bool,
    weight_bytes: int = EIGHT_BYTES,
) -> NarrowTiles:
    """Tiles for a product with `eights` times eight rows, of whose tiles `paired` ones have two.

    `weight_bytes` are those of eight rows of 64 weights in a stage.

    Each multiprocessor gets its rows in one block if they fit. Where blocks come
    often (dependent launches) a multiprocessor keeps shared memory for those of the next kernel.
    """
    if columns > COLUMNS[0] and not normed:
        rows = (eights, 2 if paired else 1)
        shared_out = _shared_out(facts, rows, inputs, columns, weight_bytes)
        if shared_out is not None:
            return shared_out
    step = 2 if paired else 1

    def shared(size: int, depth: int, *, repeated: bool) -> int:
        return narrow_bytes(
            size,
            inputs,
            columns,
            depth=depth,
            normed=normed,
            repeated=repeated,
            weight_bytes=weight_bytes,
        )

    limit, resident = _budget(facts, columns), 1 if columns > _FEW_COLUMNS else 2
    if shared(step, _SHALLOWEST, repeated=True) > limit:
        limit, resident = facts.shared_per_block, 1

    def fits(size: int, depth: int, *, repeated: bool) -> bool:
        return shared(size, depth, repeated=repeated) <= limit

    size = -(-eights // (facts.multiprocessors * step)) * step
    if columns > COLUMNS[0]:
        # Half as many blocks read the activations of several tokens.
        size = max(size, 2)
    present = facts.multiprocessors * (1 if facts.dependent else resident)
    if size > _MOST_EIGHTS or not fits(size, 2, repeated=False):
        sizes = [one for one in range(step, _MOST_EIGHTS + 1, step) if fits(one, 2, repeated=True)]
        size = min(sizes or [step], key=lambda one: _work(eights, one, present))
    groups = -(-eights // size)
    repeated = groups > present
    alone = facts.dependent and not repeated and weight_bytes == EIGHT_BYTES
    resident = 1 if _is_heavy(size, inputs, normed=normed, alone=alone) else resident
    depth = _DEEPEST if repeated else min(_DEEPEST, most_blocks(inputs))
    while depth > 1 and not fits(size, depth, repeated=repeated):
        depth -= 1
    shared_bytes = shared(size, depth, repeated=repeated)
    few = columns == COLUMNS[0] and weight_bytes == EIGHT_BYTES
    padding = _padding(facts, shared_bytes, repeated=repeated, few=few)
    blocks = min(groups, present)
    return NarrowTiles(columns, size, depth, groups, blocks, resident, shared_bytes, 0, padding)


def _is_heavy(size: int, inputs: int, *, normed: bool, alone: bool) -> bool:
    """Return True if a thread needs more registers than two blocks leave it.

    So does one that norms, and one of a block that is `alone` on its multiprocessor, with as many
    rows as there can be.
    """
    most = most_blocks(inputs)
    norms = normed and most >= _HEAVY_BLOCKS and size >= _HEAVY_EIGHTS
    return norms or (alone and most >= WARPS and size == _MOST_EIGHTS)


def _shared_out(
    facts: GpuFacts, rows: tuple[int, int], inputs: int, columns: int, weight_bytes: int
) -> NarrowTiles | None:
    """Tiles of several tokens where a multiprocessor has one block, which has all its rows at once.

    `rows` are eights, and of how many a block has a multiple. Of shares of rows and tokens those
    are taken of which a block reads least. Tokens come through a ring, as weights do. None where
    sums or rings do not fit.
    """
    (eights, step), most = rows, most_blocks(inputs)
    limit = min(facts.shared_per_block, facts.shared_per_multiprocessor - RESERVED)
    found: list[tuple[int, int, NarrowTiles]] = []
    for width in COLUMNS[1:]:
        shares = columns // width
        if not 0 < shares <= facts.multiprocessors:
            continue
        size = -(-eights // (facts.multiprocessors // shares * step)) * step
        if -(-size // 2) * width // 8 > _MOST_FRAGMENTS:
            continue
        taken = partial(
            narrow_bytes,
            size,
            inputs,
            width,
            normed=False,
            repeated=False,
            weight_bytes=weight_bytes,
        )
        fit = (
            pair for pair in _stages(most) if taken(depth=pair[0], token_stages=pair[1]) <= limit
        )
        depth, tokens = next(fit, (0, 0))
        if not depth:
            continue
        # More prefetched weights are of use where another block fits beside.
        half = facts.shared_per_multiprocessor // 2 - RESERVED
        while depth < most and taken(depth=depth + 1, token_stages=tokens) <= half:
            depth += 1
        shared, groups = taken(depth=depth, token_stages=tokens), -(-eights // size)
        resident = 2 if shared <= half and columns <= _FEW_COLUMNS else 1
        tiles = NarrowTiles(width, size, depth, groups, groups, resident, shared, tokens)
        found.append((size * 8 + width, -width, tiles))
    return min(found)[2] if found else None


def _stages(most: int) -> list[tuple[int, int]]:
    """Stages of weights and of tokens, the most wanted first: many of both, and not more than pays.

    What a block takes is missing to those of its neighbours in a step, which could begin early.
    """
    counts = range(min(most, _DEEP), min(most, _SHALLOWEST) - 1, -1)
    pairs = [(depth, tokens) for depth in counts for tokens in counts]
    return sorted(pairs, key=lambda pair: (min(pair), sum(pair)), reverse=True)


def narrow_bytes(
    size: int,
    inputs: int,
    columns: int,
    *,
    depth: int,
    normed: bool,
    repeated: bool,
    weight_bytes: int = EIGHT_BYTES,
    token_stages: int = 0,
) -> int:
    """Shared memory of a block of a narrow product."""
    ring = depth * size * weight_bytes + token_stages * columns // 8 * EIGHT_BYTES
    parts = (1 + repeated) * -(-size // 2) * (columns // 8) * _PART_BYTES
    norm = blocks_of(inputs) * 128 + 4 * WARPS * columns if normed else 0
    # With several tokens the sums of the only group lie where its weights were.
    over = columns > COLUMNS[0] and not repeated
    return WARPS * (max(ring, parts) if over else ring + parts) + norm


def is_rehearsed(facts: GpuFacts, tiles: NarrowTiles, inputs: int) -> bool:
    """Return True if blocks of one token are many, and prefetch all weights before they wait."""
    asked = tiles.groups == tiles.blocks and tiles.depth >= most_blocks(inputs)
    return facts.dependent and asked and 4 * tiles.groups > 3 * facts.multiprocessors


def takes_many(tiles: NarrowTiles) -> bool:
    """Return True if a narrow product rereads its tokens so often that a wide one is faster."""
    return tiles.columns == COLUMNS[-1] and tiles.groups > tiles.blocks


def blocks_of(inputs: int) -> int:
    """Blocks of 64 inputs."""
    return -(-inputs // 64)


def _budget(facts: GpuFacts, columns: int) -> int:
    """Shared memory of a block: about half of a multiprocessor's, all of it for many columns."""
    if columns > _FEW_COLUMNS:
        return facts.shared_per_block
    all_of_it = facts.shared_per_multiprocessor
    share = all_of_it * 11 // 20 if all_of_it >= _LARGE_SHARED else all_of_it // 2 - RESERVED
    return min(facts.shared_per_block, share)


def _padding(facts: GpuFacts, shared_bytes: int, *, repeated: bool, few: bool) -> int:
    """Return the bytes that pad a block to half of a multiprocessor's shared memory, else 0.

    Padding keeps a second block off the multiprocessor. Blocks have as many groups each: of two on
    one multiprocessor the others would wait. Those for few tokens and weights of 16 bits would be
    placed where their predecessors have left first.
    """
    whole = facts.shared_per_multiprocessor
    large = few and whole >= _LARGE_SHARED and shared_bytes > whole // 4
    return max(0, whole // 2 - shared_bytes) if facts.dependent and (repeated or large) else 0


def _work(eights: int, size: int, present: int) -> float:
    """Eights that the busiest of `present` blocks takes, and what a size costs beside."""
    groups = -(-eights // size)
    return -(-groups // present) * size * (1 + 0.02 * abs(size - 4))


_CAPABILITY = (9, 0)
_GROUP, _SEGMENTS, _BLOCK = 8, 8, 64
_BARRIER_BYTES = 128


class GroupTiles(NamedTuple):
    """A block's `eights` of rows and `widths` of tokens, eight each, through `depth` stages.

    Four warps together have eight of the eights; `shares` of such groups share the inputs, and four
    more warps fill the stages. `resident` blocks fit a multiprocessor.
    """

    eights: int
    widths: int
    depth: int
    resident: int = 1
    shares: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.eights // _GROUP * self.shares + 1) * 128

    @property
    def shared_bytes(self) -> int:
        """Bytes of the stages, the sums of segments where these are shared, and barriers."""
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
    limit = facts.shared_per_multiprocessor // tiles.resident - RESERVED
    return tiles.shared_bytes <= min(limit, facts.shared_per_block)


_WIDE_DEEP, _WIDE_SHALLOWEST = 4, 2


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
        """Threads of a block."""
        return self.eights // 2 // self.tiles * (self.widths // self.share) * 32

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage in shared memory."""
        return self.eights * self.weight_bytes + self.widths * EIGHT_BYTES

    @property
    def parts_bytes(self) -> int:
        """Bytes of the sums of a block's segments if a cluster adds them."""
        return WARPS // self.split * self.area * 4 * 64 if self.split > 1 else 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of the stages and the sums of segments."""
        return self.depth * self.stage_bytes + self.parts_bytes

    @property
    def area(self) -> int:
        """Sums of a block, in units of eight by eight."""
        return self.eights * self.widths


# Tiles of four warps each. The larger a tile, the less of it is read again, and the second cache's
# bandwidth is what large products end at (H200, 7.5 TB/s); the last number is what the others cost
# more there.
_WIDE = (
    (WideTiles(8, 16, 2, 8, _WIDE_DEEP, 2), 1.0),
    (WideTiles(12, 8, 3, 4, _WIDE_DEEP, 2), 1.15),
    (WideTiles(8, 8, 2, 4, _WIDE_DEEP, 3), 1.15),
)
# Slowdown of one block alone on a multiprocessor, whose four warps wait for one another.
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
    return _fitted(facts, tiles._replace(split=split, resident=2, depth=_WIDE_DEEP))


def _fitted(facts: GpuFacts, tiles: WideTiles) -> WideTiles:
    """Fit the stages into shared memory, with fewer blocks a multiprocessor if need be."""
    limit = min(
        facts.shared_per_block, facts.shared_per_multiprocessor // tiles.resident - RESERVED
    )
    depth = min(tiles.depth, (limit - tiles.parts_bytes) // tiles.stage_bytes)
    if depth <= _WIDE_SHALLOWEST and tiles.resident > 1:
        return _fitted(facts, tiles._replace(resident=tiles.resident - 1))
    return tiles._replace(depth=max(_WIDE_SHALLOWEST, depth))
