import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.runtime.reference.token_trees import (
    commit_path,
    fill_causal,
    fill_tree_positions,
    gather_rows,
    mask_words,
    node_depths,
    pack_mask,
    path_moves,
    unpack_mask,
)
from tests.runtime.device import tree_reference
from tests.runtime.device.tree_reference import forests

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
