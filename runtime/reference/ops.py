"""The operations around an engine; these NumPy forms specify what another device must do.

K/V storage is one flat array per layer and kind, seen through a dense view
[rows, kv_heads, slots, head_dim]; `slots` is the bucket in use.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.batch import RowMove
from hearth.runtime.image_processing.positions import RowPositions

Array = NDArray[Any]


class PageCopy(NamedTuple):
    """`tokens` slots of a row from `slot` on, and where a page has them: from `offset` on."""

    page: int
    offset: int
    row: int
    slot: int
    tokens: int


def look_up_embeddings(table: Array, token_ids: Array, out: Array) -> None:
    """Write `table[token_ids]` ([B, S] rows of [V, H]) into `out` [B, S, H], in its type.

    Ids below 0 count as 0.
    """
    if table.dtype == out.dtype:
        # Mode "clip" writes straight into `out`; ids were checked against the vocabulary.
        np.take(table, token_ids, axis=0, out=out, mode="clip")
    else:
        out[...] = table[np.maximum(token_ids, 0)]


def fill_positions(positions: Array, start: Array, lengths: Array) -> None:
    """Fill `positions` [B, S] with start + 0, 1, ...; tokens from `lengths` [B] on get 0."""
    steps = np.arange(positions.shape[1], dtype=positions.dtype)
    np.add(start[:, None], steps, out=positions)
    positions[steps >= lengths[:, None]] = 0


def splice_rows(buffer: Array, place: int, rows: Array) -> None:
    """Write `rows` [n, H] over those from `place` on of `buffer` [.., H], read flat."""
    buffer.reshape(-1, buffer.shape[-1])[place : place + len(rows)] = rows


def fill_rotary(out: Array, table: Array, axes: Array, positions: RowPositions) -> None:
    """Fill `out` [slots, R]: pair j of a slot is that of its position on axis `axes[j]`.

    `table` [positions, R] serves positions from 0 on; its last entry serves those beyond.
    """
    prompt, delta = positions
    length = prompt.shape[1]
    inside = np.minimum(prompt[axes].T, len(table) - 1)
    out[:length] = table[inside, np.arange(len(axes))]
    np.take(table, np.arange(length, len(out)) + delta, axis=0, out=out[length:], mode="clip")


def slot_index(start: Array, heads: int, length: int) -> tuple[Any, ...]:
    """Index `length` new tokens of each row in a cache view, from slot `start` [B] on.

    Rows that start together, as in a prefill, get a slice: that is several times faster.
    """
    first = int(start[0])
    if (start == first).all():
        return (slice(None), slice(None), slice(first, first + length))
    rows = np.arange(start.size)[:, None, None]
    slots = start[:, None, None] + np.arange(length)
    return (rows, np.arange(heads)[:, None], slots)


def write_rows(cache: Array, new: Array, index: tuple[Any, ...]) -> None:
    """Write `new` [B, heads, S, D] into `cache` [B, heads, slots, D] at a `slot_index`."""
    cache[index] = new


def move_rows(
    storage: Array, moves: Sequence[RowMove], heads: int, head_dim: int, slots: tuple[int, int]
) -> None:
    """Re-lay rows of flat `storage` from the first to the second number of slots, in place.

    Where the slots change, rows keep their order: when they grow, a row only ever moves up and
    the last goes first, else rows only move down and the first goes first. Otherwise they move in
    any order in which each target is free by its turn. Nothing unread is overwritten.
    """
    before, after = slots
    blocks = [
        ((move.source * heads + head) * before, (move.target * heads + head) * after, move.used)
        for move in moves
        for head in range(heads)
    ]
    table = storage.reshape(-1, head_dim)
    for source, target, used in reversed(blocks) if after > before else blocks:
        if source != target:
            table[target : target + used] = table[source : source + used]


def copy_pages(pool: Array, cache: Array, copies: Sequence[PageCopy], *, save: bool) -> None:
    """Copy slots of `cache` [rows, heads, slots, D] into `pool` [pages, heads, tokens, D].

    Without `save` it is the other way round.
    """
    for page, offset, row, slot, tokens in copies:
        stored = pool[page, :, offset : offset + tokens]
        own = cache[row, :, slot : slot + tokens]
        if save:
            stored[...] = own
        else:
            own[...] = stored


def finite_rows(logits: Array) -> NDArray[np.bool_]:
    """Return a mask [B] of the rows of `logits` [B, V] that hold finite numbers only."""
    # A maximum finds a NaN or +inf and a minimum a NaN or -inf, without a temporary array.
    finite: NDArray[np.bool_] = np.isfinite(logits.max(axis=1)) & np.isfinite(logits.min(axis=1))
    return finite
