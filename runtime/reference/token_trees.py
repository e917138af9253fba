"""Token trees in NumPy; these forms specify what another device must do.

A tree is given by parents [rows, width]: node i's parent is a node before it, -1 for a root,
-2 where there is no node. A proposal tree has many roots, the children of the newest token.
A parent that is not before its node counts as -1: rows of a padded batch may hold anything.

Wherever scores are ranked it is by `top_k`, so every device builds the same tree.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.sampling.ranking import leading

_LOWEST = np.float32(-np.inf)
# Up to this many scores are sorted; of more, those are sought that can be among the best.
_FEW = 1024
_COLUMNS = 128


def top_k(scores: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Indices of the `count` best along the last axis of `scores` [..., n], ranked.

    The highest comes first, equal ones by lowest index, and a NaN counts as -inf. `count` is
    at most n.
    """
    size = scores.shape[-1]
    flat = scores.reshape(-1, size)
    if count == 1 and (found := _highest(flat)) is not None:
        return found.reshape(*scores.shape[:-1], 1)
    if flat.size <= _FEW:
        best = np.argsort(-_known(flat), axis=-1, kind="stable")[:, :count]
    else:
        best = _leading(flat, count)
    return best.reshape(*scores.shape[:-1], count)


def _highest(scores: NDArray[np.float32]) -> NDArray[np.intp] | None:
    """The first highest of scores [rows, n]; None where a NaN, which `argmax` prefers, hides it."""
    best: NDArray[np.intp] = scores.argmax(axis=1)
    return None if np.isnan(scores[np.arange(best.size), best]).any() else best


def _leading(scores: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """`top_k` of scores [rows, n]: only what reaches a lower bound of the last place is ranked.

    Of so many columns, each the maximum of its own scores, `count` reach their `count`-th
    highest: so many scores at least do as well.
    """
    rows, size = scores.shape
    columns = min(size, max(_COLUMNS, 2 * count))
    deep = size // columns
    highest = scores[:, : deep * columns].reshape(rows, deep, columns).max(axis=1)
    highest.partition(columns - count, axis=-1)
    hits = np.flatnonzero(scores >= highest[:, columns - count, None])
    found = np.bincount(hits // size, minlength=rows)
    if found.min() < count:
        # A NaN hides what is below it.
        return np.array([leading(row, count) for row in _known(scores)])
    order = np.lexsort((-scores.reshape(-1)[hits], hits // size))
    first = (np.cumsum(found) - found)[:, None]
    best: NDArray[np.intp] = hits[order[first + np.arange(count)]] % size
    return best


def _known(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.isnan(scores), _LOWEST, scores)


Array = NDArray[Any]

NO_NODE = -2
_WORD_BITS = 32


def mask_words(width: int) -> int:
    """Words of 32 bits that the mask row of a tree of `width` nodes takes."""
    return -(-width // _WORD_BITS)


def pack_mask(parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Pack the nodes that each node sees, its ancestors and itself, from parents [rows, width].

    Bit j % 32 of word j // 32 is node j: [rows, width, words]; 0 where no node is.
    Each pass lets a node see what its so far farthest ancestor sees and doubles that distance
    (pointer jumping, Wyllie 1979).
    """
    rows, width = parents.shape
    if width == 1:
        return (parents > NO_NODE).astype(np.int32)[:, :, None]
    nodes, words = rows * width, mask_words(width)
    column = np.arange(width)
    bits = np.left_shift(1, column % _WORD_BITS).astype(np.uint32)
    seen = np.zeros((nodes + 1, words), np.uint32)
    seen[:nodes].reshape(rows, width, words)[:, column, column // _WORD_BITS] = bits
    ancestor = _flat_parents(parents, column)
    while ancestor.min() < nodes:
        seen |= seen.take(ancestor, axis=0)
        ancestor = ancestor.take(ancestor)
    packed = seen[:nodes].view(np.int32).reshape(rows, width, words)
    packed[parents <= NO_NODE] = 0
    return packed


def unpack_mask(packed: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
    """A packed mask [rows, width, words] as bool [rows, width, width]."""
    data = packed.astype("<i4", copy=False).view(np.uint8)
    return np.unpackbits(data, axis=-1, count=width, bitorder="little").view(np.bool_)


def node_depths(packed: NDArray[np.int32]) -> NDArray[np.intp]:
    """Ancestors of each node, [rows, width]; -1 where there is no node."""
    depths: NDArray[np.intp] = np.bitwise_count(packed.view(np.uint32)).sum(axis=-1, dtype=np.intp)
    depths -= 1
    return depths


def fill_tree_positions(positions: Array, start: Array, depths: NDArray[np.intp]) -> None:
    """Write start [rows] + depth into `positions` [rows, width], 0 where the depth is -1."""
    np.add(start[:, None], depths, out=positions, casting="same_kind")
    positions[depths < 0] = 0


def fill_causal(mask: NDArray[np.bool_]) -> None:
    """Let token i of `mask` [rows, S, S] see the tokens 0 to i."""
    mask[...] = np.tri(mask.shape[-1], dtype=np.bool_)


def causal_words(width: int) -> NDArray[np.int32]:
    """The packed mask [width, words] of a causal step: token i sees the tokens 0 to i."""
    words: NDArray[np.int32] = pack_mask(np.arange(-1, width - 1, dtype=np.int32)[None])[0]
    return words


class Proposal(NamedTuple):
    """A proposal in the making: P slots of the proposal tree and D table entries a row.

    The table holds the root, the K tokens after it, and for each level r of the tree, from 0
    on, the K * K tokens after that level's slots, from entry 1 + K + r * K * K on.
    """

    ids: NDArray[np.int32]
    """[rows, P]: the token of each slot; level r has the slots r * K to r * K + K - 1."""
    parents: NDArray[np.int32]
    """[rows, P]: the parent's slot, -1 for a child of the root, -2 for a slot that is not there."""
    entries: NDArray[np.int32]
    """[rows, P]: the table entry of each slot."""
    table_ids: NDArray[np.int32]
    """[rows, D]."""
    table_parents: NDArray[np.int32]
    """[rows, D]: the parent's entry, -1 for the root."""
    table_scores: NDArray[np.float32]
    """[rows, D]: the sum of log-probabilities from the root; -inf where nothing was entered."""


def begin_proposal(
    proposal: Proposal, logits: NDArray[np.float32], full_ids: NDArray[np.int32] | None, count: int
) -> None:
    """Enter the root and the `count` best tokens by `logits` [rows, Vd], which become slots.

    Entries behind them have score -inf, token 0 and the root as parent; slots behind them are
    not there: token 0, parent -2.
    """
    best = top_k(logits, count)
    tokens, scores = map_ids(best, full_ids), _log_probabilities(logits, best)
    proposal.ids[...] = proposal.table_ids[...] = 0
    proposal.table_parents[...] = 0
    proposal.table_scores[...] = _LOWEST
    proposal.table_parents[:, 0] = -1
    proposal.table_scores[:, 0] = 0
    proposal.table_ids[:, 1 : 1 + count] = proposal.ids[:, :count] = tokens
    # The sum with the root's score: no score is ever -0.0.
    proposal.table_scores[:, 1 : 1 + count] = proposal.table_scores[:, :1] + scores
    proposal.parents[...] = NO_NODE
    proposal.parents[:, :count] = -1
    proposal.entries[:, :count] = np.arange(1, 1 + count)


def extend_proposal(
    proposal: Proposal,
    logits: NDArray[np.float32],
    full_ids: NDArray[np.int32] | None,
    level: int,
    *,
    last: bool,
) -> NDArray[np.intp]:
    """Enter the K best tokens after each of the K slots of `level` by `logits` [rows, K, Vd].

    The K best of these K * K become the slots of the next level, unless this is the last.
    Returns which slot of the level (0 to K - 1) each of them follows: [rows, K], or [rows, 0].
    """
    rows, count, _ = logits.shape
    slots = slice(level * count, (level + 1) * count)
    first = 1 + count + level * count * count
    block = slice(first, first + count * count)
    best = top_k(logits, count)
    before = proposal.entries[:, slots]
    sums = _at(proposal.table_scores, before)[:, :, None]
    scores = (sums + _log_probabilities(logits, best)).reshape(rows, -1)
    tokens = map_ids(best, full_ids).reshape(rows, -1)
    proposal.table_ids[:, block] = tokens
    proposal.table_parents[:, block] = np.repeat(before, count, axis=1)
    proposal.table_scores[:, block] = scores
    if last:
        return np.empty((rows, 0), np.intp)
    chosen = top_k(scores, count)
    following: NDArray[np.intp] = chosen // count
    new = slice(slots.stop, slots.stop + count)
    proposal.ids[:, new] = _at(tokens, chosen)
    proposal.parents[:, new] = following + slots.start
    proposal.entries[:, new] = chosen + first
    return following


def finish_proposal(
    proposal: Proposal, speculating: NDArray[np.bool_], width: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The best `width` entries of each row as trees: ids and parents, both [rows, width].

    A row that is not `speculating` [rows] gets node 0 alone. A parent is always a node before
    its child: a child's score is its parent's plus a number that is at most 0, which rounding
    cannot carry above the parent's, and of equal scores the parent has the lower entry.
    """
    best = top_k(proposal.table_scores, width)
    ids = _at(proposal.table_ids, best)
    node_of = np.empty(proposal.table_ids.shape, np.int32)
    np.put_along_axis(node_of, best, np.arange(width, dtype=np.int32)[None], -1)
    before = _at(proposal.table_parents, best)
    before[:, 0] = 0
    parents = _at(node_of, before)
    parents[:, 0] = -1
    resting = ~speculating
    ids[resting] = 0
    parents[resting, 1:] = NO_NODE
    return ids, parents


def map_ids(draft_ids: Array, full_ids: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """The base's ids of draft ids of any shape; the same where `full_ids` [Vd] is None."""
    if full_ids is None:
        return draft_ids.astype(np.int32)
    mapped: NDArray[np.int32] = full_ids[draft_ids]
    return mapped


def begin_hidden(hidden: Array, fresh: Array, count: int) -> None:
    """Give the first `count` slots of `hidden` [rows, P, H] the root's `fresh` [rows, 1, H].

    Slots that are not there yet get zeros: what they held may not be finite.
    """
    hidden[:, :count] = fresh
    hidden[:, count:] = 0


def extend_hidden(
    hidden: Array, fresh: Array, following: NDArray[np.intp], first_slot: int
) -> None:
    """Give the slots of `hidden` [rows, P, H] from `first_slot` on what they follow.

    Slot i of them follows `fresh[b, following[b, i]]`, `fresh` being [rows, K, H].
    """
    rows, count, size = fresh.shape
    first = np.arange(0, rows * count, count)[:, None]
    behind = first_slot + following.shape[1]
    hidden[:, first_slot:behind] = fresh.reshape(-1, size).take(following + first, axis=0)


def gather_rows(source: Array, index: NDArray[np.int32], out: Array) -> None:
    """`out[b, i] = source[b, index[b, i]]`, zeros where the index is negative.

    `source` is [rows, width, H], `index` [rows, n] and `out` [rows, n, H], of one type. They
    must not overlap: a row's output may lie where another row's input does.
    """
    absent = index < 0
    if absent.all():
        out[...] = 0
        return
    rows, width, size = source.shape
    first = np.arange(0, rows * width, width)[:, None]
    # Mode "clip" writes straight into `out`; what it makes of negative numbers is zeroed.
    np.take(source.reshape(-1, size), index + first, axis=0, out=out, mode="clip")
    out[absent] = 0


class PathMoves(NamedTuple):
    """Rows of a cache seen as [rows * heads * slots, D] that change places, all at once."""

    source: NDArray[np.intp]
    target: NDArray[np.intp]


def path_moves(
    nodes: NDArray[np.int32], starts: NDArray[np.intp], heads: int, slots: int
) -> PathMoves:
    """Make the moves of slot `starts[b] + nodes[b, i]` to `starts[b] + i`, for any layer's cache.

    `nodes` [rows, n] ascends along a row until negative entries end it. A slot that is in its
    place already does not move.
    """
    row, place = np.nonzero(nodes > np.arange(nodes.shape[1]))
    origin = (row * heads * slots + starts[row])[:, None] + np.arange(heads) * slots
    source = (origin + nodes[row, place][:, None]).reshape(-1)
    return PathMoves(source, (origin + place[:, None]).reshape(-1))


def commit_path(cache: Array, moves: PathMoves) -> None:
    """Apply `path_moves` to a contiguous `cache` [rows, heads, slots, D].

    All sources are read before any target is written, for a target may be another's source.
    """
    table = cache.reshape(-1, cache.shape[-1])
    table[moves.target] = table[moves.source]


def _flat_parents(parents: NDArray[np.int32], column: NDArray[np.intp]) -> NDArray[np.intp]:
    """The parent's place among the nodes of all rows: [rows * width + 1].

    The last entry is "no node"; it leads to itself.
    """
    rows, width = parents.shape
    nodes = rows * width
    flat = np.full(nodes + 1, nodes)
    places = parents + np.arange(0, nodes, width)[:, None]
    led = (parents >= 0) & (parents < column)
    np.copyto(flat[:nodes].reshape(rows, width), places, where=led)
    return flat


def _log_probabilities(logits: NDArray[np.float32], best: NDArray[np.intp]) -> NDArray[np.float32]:
    # At most 0, whatever the engine's rounding: the order of a tree's nodes rests on it.
    picked: NDArray[np.float32] = _at(logits, best)
    np.minimum(picked, 0, out=picked)
    picked[np.isnan(picked)] = _LOWEST
    return picked


def _at(values: Array, index: Array) -> Array:
    """`values` [..., n] at `index` [..., k], along the last axis."""
    size = values.shape[-1]
    first = np.arange(0, values.size, size).reshape(*values.shape[:-1], 1)
    return values.reshape(-1).take(index + first)
