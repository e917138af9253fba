from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hearth.runtime.batch import RowMove
from hearth.runtime.export.reference_pass import rotate, softmax
from hearth.runtime.reference.ops import (
    fill_positions,
    finite_rows,
    look_up_embeddings,
    move_rows,
    slot_index,
    write_rows,
)
from hearth.runtime.reference.token_trees import (
    commit_path,
    fill_causal,
    fill_tree_positions,
    gather_rows,
    mask_words,
    node_depths,
    pack_mask,
    path_moves,
    top_k,
    unpack_mask,
)
from tests.runtime.device import tree_reference
from tests.runtime.device.tree_reference import best, forests
from tests.runtime.executor.kernels import product_reference as gemm
from tests.runtime.executor.kernels.attention_steps import attended, rotated, seen_slots

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


@pytest.mark.parametrize("seen", [1, 63, 64, 65, 255, 256, 257, 700])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_splits_and_spans_are_one_softmax(seen: int, dtype: type) -> None:
    drawn = np.random.default_rng(seen)
    query = drawn.normal(size=48).astype(np.float32)
    keys, values = drawn.normal(size=(2, seen, 48)).astype(np.float32)
    shares = softmax(keys @ query)
    found = attended(query, keys, values, np.dtype(dtype))
    error = np.finfo(dtype).eps * (shares @ np.abs(values)) * 2
    assert (np.abs(found - shares @ values) <= error + 1e-6).all()


def test_who_sees_nothing_gets_zeros() -> None:
    nothing = np.zeros((0, 16), np.float16)
    assert not attended(np.ones(16), nothing, nothing, np.dtype(np.float16)).any()


def test_heads_are_turned_as_the_reference_turns_them() -> None:
    drawn = np.random.default_rng(0)
    heads = drawn.normal(size=(3, 5, 16)).astype(np.float32)
    angles = drawn.normal(size=(5, 4)).astype(np.float32)
    tables = (np.cos(angles), np.sin(angles))
    turned = rotated(heads, None, 0.0, tables, 0.25)
    assert np.allclose(turned, rotate(heads, *tables) / 4, atol=1e-6)
    gain = drawn.normal(size=16).astype(np.float32)
    normal = heads / np.sqrt(np.mean(np.square(heads), axis=-1, keepdims=True) + 0.5) * gain
    assert np.allclose(rotated(heads, gain, 0.5, tables, 1), rotate(normal, *tables), atol=1e-6)


def test_a_node_sees_its_path_behind_the_filled_slots() -> None:
    parents = np.full((1, 40), -1, np.int32)
    parents[0, [3, 9, 38, 39]] = [0, 3, 9, -2]
    mask = pack_mask(parents)[0]
    assert seen_slots(2, 38, mask[38]) == [0, 1, 2, 5, 11, 40]
    assert seen_slots(2, 39, mask[39]) == [0, 1]
    assert seen_slots(0, 39, mask[39]) == []
    assert seen_slots(2, 1, None) == [0, 1, 2, 3]


@pytest.mark.parametrize("inputs", [8, 64, 72, 520, 1024, 9728])
def test_segments_are_whole_blocks_in_order(inputs: int) -> None:
    parts = gemm.segments(inputs)
    assert len(parts) == 8
    covered = [place for part in parts for place in range(part.start, part.stop)]
    assert covered == list(range(inputs))
    assert all(part.start % 64 == 0 for part in parts if part.start < part.stop)


def test_a_product_and_its_bias() -> None:
    random = np.random.default_rng(0)
    a = random.standard_normal((3, 200)).astype(np.float16)
    weights = random.standard_normal((16, 200)).astype(ml_dtypes.bfloat16)
    bias = random.standard_normal(16).astype(np.float16)
    found = gemm.product(a, weights, bias)
    exact = a.astype(np.float64) @ weights.astype(np.float64).T + bias
    assert found.dtype == np.float32
    assert np.allclose(found, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("inputs", [8, 72, 520, 1024])
def test_a_norm(inputs: int) -> None:
    x = np.random.default_rng(1).standard_normal((3, inputs)).astype(np.float32)
    assert np.allclose(gemm.squares(x), np.square(x.astype(np.float64)).sum(1), rtol=1e-6)
    gain = np.linspace(0.5, 2, inputs).astype(np.float16)
    found = gemm.normed(x, gain, 1e-6, np.dtype(np.float16))
    exact = x / np.sqrt(np.square(x).mean(1, keepdims=True) + 1e-6) * gain
    assert found.dtype == np.float16
    assert np.allclose(found, exact, rtol=2**-10)


def test_the_activation() -> None:
    gate, up = np.array([-3.0, 0.0, 2.0], np.float32), np.array([1.0, 5.0, -2.0], np.float32)
    found = gemm.gated(gate, up, np.dtype(np.float16))
    assert np.allclose(found, [-0.14228, 0.0, -3.52319], rtol=2**-10)


ODD = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.0]


def _reference(scores: np.ndarray, count: int) -> list[list[int]]:
    return [best(row, count) for row in scores.reshape(-1, scores.shape[-1]).tolist()]


def _check(scores: np.ndarray, count: int) -> None:
    found = top_k(scores, count)
    assert found.shape == (*scores.shape[:-1], count)
    assert found.reshape(-1, count).tolist() == _reference(scores, count)


@pytest.mark.parametrize("size", [1, 7, 127, 128, 129, 1000, 4099])
def test_the_best_are_found_among_few_and_many(size: int) -> None:
    scores = np.random.default_rng(size).normal(size=(2, 3, size)).astype(np.float32)
    for count in {1, min(4, size), min(60, size), min(300, size), size}:
        _check(scores, count)


@pytest.mark.parametrize("size", [40, 1100, 3000])
@pytest.mark.parametrize("kinds", [1, 2, 5])
def test_equal_scores_rank_by_index(size: int, kinds: int) -> None:
    scores = np.random.default_rng(kinds).integers(kinds, size=(3, size)).astype(np.float32)
    for count in (1, 10, 40):
        _check(scores, count)


@given(
    st.integers(0, 10_000),
    st.sampled_from([20, 600, 2000]),
    st.integers(1, 20),
    st.sampled_from([0.01, 0.5, 1.0]),
)
def test_numbers_that_are_not_finite_have_their_place(
    seed: int, size: int, count: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(2, size)).astype(np.float32)
    odd = rng.random(scores.shape) < share
    scores[odd] = rng.choice(np.array(ODD, np.float32), size=int(odd.sum()))
    _check(scores, count)


def test_a_row_without_a_number_gives_its_first_indices() -> None:
    scores = np.full((2, 2000), np.nan, np.float32)
    scores[1, 1500] = -5
    assert top_k(scores, 3).tolist() == [[0, 1, 2], [1500, 0, 1]]


def test_scores_are_only_read() -> None:
    scores = np.random.default_rng(0).normal(size=(2, 1500)).astype(np.float32)
    before = scores.copy()
    top_k(scores, 5)
    assert np.array_equal(scores, before)


WIDTHS = st.sampled_from([1, 2, 5, 31, 32, 33, 60, 64, 65, 128])


def _array(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, np.int32)


@given(forests(WIDTHS))
def test_a_node_sees_its_ancestors_and_itself(rows: list[list[int]]) -> None:
    packed = pack_mask(_array(rows))
    assert packed.dtype == np.int32
    assert packed.shape == (len(rows), len(rows[0]), mask_words(len(rows[0])))
    assert packed.tolist() == [tree_reference.packed(row) for row in rows]


@given(forests(WIDTHS))
def test_an_unpacked_mask_is_the_one_of_the_parents(rows: list[list[int]]) -> None:
    mask = unpack_mask(pack_mask(_array(rows)), len(rows[0]))
    assert mask.dtype == np.bool_
    assert mask.tolist() == [tree_reference.mask(row) for row in rows]


@pytest.mark.parametrize("width", [1, 32, 33, 128])
def test_a_chain_is_causal(width: int) -> None:
    chain = np.arange(-1, width - 1, dtype=np.int32)[None]
    causal = np.zeros((1, width, width), np.bool_)
    fill_causal(causal)
    assert np.array_equal(unpack_mask(pack_mask(chain), width), causal)
    assert causal[0].tolist() == [[j <= i for j in range(width)] for i in range(width)]


def test_a_parent_that_is_not_before_its_node_counts_as_none() -> None:
    # Rows that pad a batch hold what an earlier step of another width left there.
    packed = pack_mask(_array([[1, 0, 99, 2], [-1, 0, 1, 2]]))
    mask = unpack_mask(packed, 4)
    assert mask[0].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]
    assert mask[1].tolist() == np.tri(4, dtype=bool).tolist()


@given(forests(WIDTHS), st.sampled_from([np.int64, np.int32]))
def test_positions_are_the_start_plus_the_depth(rows: list[list[int]], index: type) -> None:
    start: np.ndarray = np.arange(7, 7 + len(rows), dtype=index)
    out: np.ndarray = np.full((len(rows), len(rows[0])), 99, index)
    fill_tree_positions(out, start, node_depths(pack_mask(_array(rows))))
    wanted = [tree_reference.positions(row, 7 + number) for number, row in enumerate(rows)]
    assert out.tolist() == wanted


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_gathered_rows_are_those_of_the_index_and_zeros(dtype: type) -> None:
    source: np.ndarray = np.arange(1, 25).reshape(2, 4, 3).astype(dtype)
    out: np.ndarray = np.full((2, 3, 3), 77, dtype)
    gather_rows(source, _array([[0, 2, -1], [3, -1, -1]]), out)
    assert out[0].tolist() == [source[0, 0].tolist(), source[0, 2].tolist(), [0, 0, 0]]
    assert out[1].tolist() == [source[1, 3].tolist(), [0, 0, 0], [0, 0, 0]]


def test_a_buffer_is_cleared_by_an_index_of_no_rows() -> None:
    buffer = np.full((1, 6, 2), np.nan, np.float32)
    gather_rows(buffer[:, :1], np.full((1, 4), -1, np.int32), buffer[:, :4])
    assert (buffer[0, :4] == 0).all()
    assert np.isnan(buffer[0, 4:]).all()


@st.composite
def _paths(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    width, longest = draw(st.integers(1, 40)), draw(st.integers(1, 7))
    paths = []
    for _ in range(draw(st.integers(1, 4))):
        further = draw(st.sets(st.integers(1, 39), max_size=longest - 1))
        path = [0, *sorted(node for node in further if node < width)]
        paths.append(path + [-1] * (longest - len(path)))
    return paths, [draw(st.integers(0, 20)) for _ in paths]


@given(_paths())
def test_a_committed_path_lies_behind_the_filled_slots(
    case: tuple[list[list[int]], list[int]],
) -> None:
    paths, starts = case
    heads, slots, size = 2, 64, 3
    cache = np.random.default_rng(1).normal(size=(len(paths), heads, slots, size))
    wanted = cache.copy()
    for row, (path, start) in enumerate(zip(paths, starts, strict=True)):
        for place, node in enumerate(node for node in path if node >= 0):
            wanted[row, :, start + place] = cache[row, :, start + node]
    commit_path(cache, path_moves(_array(paths), np.array(starts), heads, slots))
    assert np.array_equal(cache, wanted)


def test_a_path_that_is_in_its_place_moves_nothing() -> None:
    moves = path_moves(_array([[0, 1, 2, -1], [0, -1, -1, -1]]), np.array([5, 6]), 4, 16)
    assert moves.source.size == 0
    assert path_moves(_array([[0, 1, 3]]), np.array([5]), 4, 16).source.size == 4
