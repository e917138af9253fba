from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hearth.runtime.batch import RowMove
from hearth.runtime.reference.ops import (
    fill_positions,
    finite_rows,
    look_up_embeddings,
    move_rows,
    slot_index,
    write_rows,
)

HEADS, HEAD_DIM = 2, 3


def _view(storage: NDArray[Any], rows: int, slots: int) -> NDArray[Any]:
    """The first rows of flat storage as a dense array of so many slots; shares memory."""
    return storage[: rows * HEADS * slots * HEAD_DIM].reshape(rows, HEADS, slots, HEAD_DIM)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_embeddings_are_looked_up_in_the_type_of_the_step(stored: type) -> None:
    table: NDArray[Any] = np.arange(12, dtype=np.float32).reshape(4, 3).astype(stored)
    out = np.full((2, 2, 3), -1, np.float32)
    look_up_embeddings(table, np.array([[3, 0], [1, 1]]), out)
    assert out.tolist() == [[[9, 10, 11], [0, 1, 2]], [[3, 4, 5], [3, 4, 5]]]


@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_a_token_of_a_failed_row_counts_as_the_first(stored: type) -> None:
    table: NDArray[Any] = np.arange(6, dtype=stored).reshape(2, 3)
    out = np.full((1, 2, 3), -1, np.float32)
    look_up_embeddings(table, np.array([[-1, 1]], np.int32), out)
    assert out.tolist() == [[[0, 1, 2], [3, 4, 5]]]


@pytest.mark.parametrize("index", [np.int64, np.int32])
def test_positions_count_from_the_start_and_padding_has_position_zero(index: type) -> None:
    positions: NDArray[Any] = np.full((3, 4), 9, index)
    fill_positions(positions, np.array([5, 0, 2], index), np.array([4, 2, 0], index))
    assert positions.tolist() == [[5, 6, 7, 8], [0, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("start", [[1, 1], [0, 3]])
def test_new_rows_are_written_from_each_rows_own_slot(start: list[int]) -> None:
    cache = np.zeros((2, HEADS, 6, HEAD_DIM), np.float32)
    new = np.arange(1, 25, dtype=np.float32).reshape(2, HEADS, 2, HEAD_DIM)
    expected = cache.copy()
    for row, slot in enumerate(start):
        expected[row, :, slot : slot + 2] = new[row]
    write_rows(cache, new, slot_index(np.array(start), HEADS, 2))
    assert np.array_equal(cache, expected)


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[list[int], list[bool], int, int]:
    before, after = draw(st.sampled_from([(4, 4), (4, 9), (9, 4), (3, 8)]))
    used = draw(st.lists(st.integers(0, min(before, after)), min_size=1, max_size=5))
    kept = [draw(st.booleans()) or after > before for _ in used]
    return used, kept, before, after


@given(_layouts())
def test_moved_rows_keep_their_used_slots(layout: tuple[list[int], list[bool], int, int]) -> None:
    used, kept, before, after = layout
    storage = np.zeros(5 * HEADS * 9 * HEAD_DIM)
    old = _view(storage, len(used), before)
    old[:] = np.random.default_rng(0).normal(size=old.shape)
    want = [old[row, :, : used[row]].copy() for row in range(len(used)) if kept[row]]
    sources = [row for row in range(len(used)) if kept[row]]
    moves = [RowMove(row, target, used[row]) for target, row in enumerate(sources)]
    move_rows(storage, moves, HEADS, HEAD_DIM, (before, after))
    new = _view(storage, max(1, len(want)), after)
    for row, rows in enumerate(want):
        assert np.array_equal(new[row, :, : rows.shape[1]], rows)


def test_a_move_copies_used_slots_only() -> None:
    storage = np.zeros(2 * HEADS * 4 * HEAD_DIM)
    view = _view(storage, 2, 4)
    view[0], view[1] = 1, 2
    move_rows(storage, [RowMove(1, 0, 3)], HEADS, HEAD_DIM, (4, 4))
    assert (view[0, :, :3] == 2).all()
    assert (view[0, :, 3:] == 1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_finite_rows_sees_every_kind_of_non_finite_number(bad: float) -> None:
    logits = np.zeros((3, 4), np.float32)
    logits[1, 2] = bad
    assert finite_rows(logits).tolist() == [True, False, True]


def test_large_finite_rows_are_finite() -> None:
    largest = np.finfo(np.float32).max
    assert finite_rows(np.full((1, 4), largest, np.float32)).tolist() == [True]
