from functools import cache
from typing import NamedTuple

from runtime.executor.kernels.launch import GpuFacts

COLUMNS = (8, 16, 32, 64)
"""The numbers of tokens that narrow products are made for."""
NORMED_TOKENS = 8
"""Steps of up to so many tokens norm their inputs in the product itself."""
WARPS = 8
EIGHT_BYTES = 1024
"""Of eight rows of 64 elements in a stage, weights or activations."""
_MOST_HELD = 5
_MOST_EIGHTS = 6
_DEEPEST, _DEEP, _SHALLOWEST = 8, 4, 2
_FEW_COLUMNS = 16
# From here on a thread that norms needs more registers than two blocks leave it.
_HEAVY_BLOCKS, _HEAVY_EIGHTS = 4, 5
_LARGE_SHARED = 200 << 10
# Shares of the tokens and tiles of a warp of a cluster, and the sums that leave registers for two.
_SPREAD = ((1, 1), (1, 2), (1, 3))
_FEW_SUMS = 64
# What they are for.
_SPREAD_COLUMNS, _SPREAD_EIGHTS, _SPREAD_INPUTS = 16, 256, 2048
# Sums that leave a thread registers: tiles of sixteen rows by eight tokens.
_MOST_FRAGMENTS = 24
# Groups of a warp, tiles in order of preference, and stages, from which tall products pay.
_TALL_EIGHTS, _TALL, _TALL_DEPTH = 4, ((8, 1),), 3
RESERVED = 1024
"""Shared memory of a multiprocessor that each block takes beside its own."""
_PART_BYTES = 16 * 32
_ITEM_BYTES = _PART_BYTES * WARPS
_SHARE_BYTES = 16 * 32 // 2


class NarrowTiles(NamedTuple):
    """How a narrow product is shared out.

    A block has `eights` times eight rows at a time and `depth` stages of a ring for each warp;
    `blocks` take `groups` of these in turn, for each `columns` tokens of a step. `resident` is what
    the compiler keeps registers for.
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


class TallTiles(NamedTuple):
    """A warp's `tiles` of sixteen rows and `depth` stages; all warps take `groups` of these."""

    warps: int
    tiles: int
    depth: int
    groups: int
    shared_bytes: int


class SpreadTiles(NamedTuple):
    """How a product is shared out over clusters of eight blocks, one for each segment.

    A warp has `tiles` tiles of sixteen rows of a group, for one of `token_warps` shares of the
    tokens, and `depth` stages of a ring; `clusters` take `groups` in turn.
    """

    token_warps: int
    tiles: int
    depth: int
    groups: int
    clusters: int
    resident: int
    shared_bytes: int


def most_blocks(inputs: int) -> int:
    """Blocks of 64 inputs in the longest of the eight segments."""
    return -(-blocks_of(inputs) // WARPS)


def norms_itself(inputs: int, tokens: int) -> bool:
    """Whether a product of so many tokens norms its inputs, rather than a launch before it."""
    return tokens <= NORMED_TOKENS and most_blocks(inputs) <= _MOST_HELD


def columns_for(tokens: int) -> int | None:
    """The columns of the narrow product for so many tokens; None where a wide one takes them."""
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

    Each multiprocessor gets its rows in one block where that has room for them. Where blocks come
    often (dependent launches) a multiprocessor keeps room for those of the next kernel.
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

    def fits(size: int, depth: int, *, repeated: bool) -> bool:
        return shared(size, depth, repeated=repeated) <= _budget(facts, columns)

    size = -(-eights // (facts.multiprocessors * step)) * step
    if columns > COLUMNS[0]:
        # Half as many blocks read the activations of several tokens.
        size = max(size, 2)
    resident = 1 if columns > _FEW_COLUMNS else 2
    present = facts.multiprocessors * (1 if facts.dependent else resident)
    if size > _MOST_EIGHTS or not fits(size, 2, repeated=False):
        sizes = [one for one in range(step, _MOST_EIGHTS + 1, step) if fits(one, 2, repeated=True)]
        size = min(sizes or [step], key=lambda one: _work(eights, one, present))
    if normed and most_blocks(inputs) >= _HEAVY_BLOCKS and size >= _HEAVY_EIGHTS:
        resident = 1
    groups = -(-eights // size)
    repeated = groups > present
    depth = _DEEPEST if repeated else min(_DEEPEST, most_blocks(inputs))
    while depth > 1 and not fits(size, depth, repeated=repeated):
        depth -= 1
    shared_bytes = shared(size, depth, repeated=repeated)
    # Blocks have as many groups each: of two on one multiprocessor the others would wait.
    half = facts.shared_per_multiprocessor // 2 if repeated and facts.dependent else 0
    padding = max(0, half - shared_bytes)
    blocks = min(groups, present)
    return NarrowTiles(columns, size, depth, groups, blocks, resident, shared_bytes, 0, padding)


def _shared_out(
    facts: GpuFacts, rows: tuple[int, int], inputs: int, columns: int, weight_bytes: int
) -> NarrowTiles | None:
    """Tiles of several tokens where a multiprocessor has one block, which has all its rows at once.

    `rows` are eights, and of how many a block has a multiple. Of shares of rows and tokens those
    are taken of which a block reads least. Tokens come through a ring, as weights do. None where
    there is no room for sums or rings.
    """
    (eights, step), most = rows, most_blocks(inputs)
    room = min(facts.shared_per_block, facts.shared_per_multiprocessor - RESERVED)
    found: list[tuple[int, int, NarrowTiles]] = []
    for width in COLUMNS[1:]:
        shares = columns // width
        if not 0 < shares <= facts.multiprocessors:
            continue
        size = -(-eights // (facts.multiprocessors // shares * step)) * step
        if -(-size // 2) * width // 8 > _MOST_FRAGMENTS:
            continue
        for depth, tokens in _stages(most):
            shared = narrow_bytes(
                size,
                inputs,
                width,
                depth=depth,
                normed=False,
                repeated=False,
                weight_bytes=weight_bytes,
                token_stages=tokens,
            )
            if shared <= room:
                groups = -(-eights // size)
                both = 2 * (shared + RESERVED) <= facts.shared_per_multiprocessor
                resident = 2 if both and columns <= _FEW_COLUMNS else 1
                tiles = NarrowTiles(width, size, depth, groups, groups, resident, shared, tokens)
                found.append((size * 8 + width, -width, tiles))
                break
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
    # Of several tokens the sums of the only group lie where its weights were.
    over = columns > COLUMNS[0] and not repeated
    return WARPS * (max(ring, parts) if over else ring + parts) + norm


def takes_many(tiles: NarrowTiles) -> bool:
    """Whether a narrow product reads its tokens so often that a wide one takes less."""
    return tiles.columns == COLUMNS[-1] and tiles.groups > tiles.blocks


@cache
def tall_tiles(
    facts: GpuFacts, eights: int, inputs: int, columns: int, weight_bytes: int = EIGHT_BYTES
) -> TallTiles | None:
    """Tiles for many rows by several tokens; None where the tokens leave no room for rings."""
    if columns <= COLUMNS[0] or eights < _TALL_EIGHTS * WARPS * facts.multiprocessors:
        return None
    tokens = blocks_of(inputs) * columns // 8 * EIGHT_BYTES
    room = min(facts.shared_per_block, facts.shared_per_multiprocessor - RESERVED) - tokens
    for warps, tiles in _TALL:
        stage = 2 * tiles * weight_bytes
        depth = min(_DEEPEST, room // (warps * stage))
        if depth >= _TALL_DEPTH:
            shared_bytes = tokens + warps * depth * stage
            return TallTiles(warps, tiles, depth, -(-eights // (2 * tiles)), shared_bytes)
    return None


@cache
def spread_tiles(
    facts: GpuFacts,
    eights: int,
    inputs: int,
    columns: int,
    *,
    normed: bool,
    weight_bytes: int = EIGHT_BYTES,
) -> SpreadTiles | None:
    """Tiles for a product of several tokens by clusters; None where there are none, or no room.

    A cluster has all of the inputs of its tokens in its blocks' shared memory.
    """
    # Elsewhere narrow products are faster: what their blocks read of few inputs comes in the time
    # in which the blocks of a cluster meet (H200).
    if not facts.dependent or columns != _SPREAD_COLUMNS or facts.multiprocessors < WARPS:
        return None
    if eights < _SPREAD_EIGHTS or inputs < _SPREAD_INPUTS:
        return None
    if normed and most_blocks(inputs) > _MOST_HELD:
        return None
    clusters, widths = facts.multiprocessors // WARPS, columns // 8
    found: list[tuple[float, SpreadTiles]] = []
    for token_warps, tiles in _SPREAD:
        if widths % token_warps:
            continue
        rows = 2 * WARPS // token_warps * tiles
        groups = -(-eights // rows)
        sums = 4 * tiles * widths // token_warps
        taken = min(groups, clusters)
        resident = 2 if sums <= (_FEW_SUMS if taken == groups else _FEW_SUMS // 2) else 1
        shape = SpreadTiles(token_warps, tiles, _SHALLOWEST, groups, taken, resident, 0)
        shape = _deepened(facts, shape, inputs, columns, weight_bytes)
        if shape.shared_bytes <= facts.shared_per_block:
            # The blocks of a cluster meet once a group.
            work = -(-groups // clusters) * (rows + WARPS) * (1 if shape.resident > 1 else 1.2)
            found.append((work + token_warps, shape))
    return min(found)[1] if found else None


def _deepened(
    facts: GpuFacts, tiles: SpreadTiles, inputs: int, columns: int, weight_bytes: int
) -> SpreadTiles:
    """The same with as many stages as are of use and leave room for the next kernel's blocks."""
    repeated = tiles.groups > tiles.clusters
    share = columns // 8 // tiles.token_warps
    activations = most_blocks(inputs) * columns // 8 * EIGHT_BYTES
    parts = 2 * tiles.tiles * share * _ITEM_BYTES if repeated else 0

    def shared(depth: int) -> int:
        ring = WARPS * depth * 2 * tiles.tiles * weight_bytes
        return ring + activations + parts + 4 * columns

    # The sums of a cluster's only group lie where the ring was.
    least = _SHALLOWEST if repeated else max(_SHALLOWEST, -(-share * _SHARE_BYTES // weight_bytes))
    depth = _DEEPEST if repeated else max(least, most_blocks(inputs))
    room = facts.shared_per_multiprocessor * 11 // 20
    while depth > least and shared(depth) > room:
        depth -= 1
    return tiles._replace(depth=depth, shared_bytes=shared(depth))


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


def _work(eights: int, size: int, present: int) -> float:
    """Eights that the busiest of `present` blocks takes, and what a size costs beside."""
    groups = -(-eights // size)
    return -(-groups // present) * size * (1 + 0.02 * abs(size - 4))
