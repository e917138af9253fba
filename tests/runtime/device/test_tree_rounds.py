from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.cpu.ops import CpuCacheStorage
from hearth.runtime.device.cpu.tree_ops import CpuTreeOps
from hearth.runtime.device.device import TreeOps
from hearth.runtime.reference import token_trees
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device.tree_rounds import Rounds

WIDTHS = [1, 2, 9, 33, 40, 70]


def _play(seed: int, rows: int, width: int, ops: TreeOps | None = None) -> list[int]:
    """Three rounds; how many tokens each row gained in each."""
    device = CpuDevice()
    play = Rounds(device, ops or device.tree_ops, np.random.default_rng(seed), rows, width)
    return [len(nodes) for _ in range(3) for nodes in play.round()]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 32), st.integers(1, 4), st.sampled_from(WIDTHS))
def test_rounds_through_any_trees_are_plain_decoding(seed: int, rows: int, width: int) -> None:
    _play(seed, rows, width)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1 << 32), st.sampled_from(WIDTHS), st.integers(0, 3))
def test_rows_may_leave_between_rounds(seed: int, width: int, leaver: int) -> None:
    device = CpuDevice()
    play = Rounds(device, device.tree_ops, np.random.default_rng(seed), 4, width)
    play.round()
    play.evict(leaver)
    play.round()
    play.evict(0)
    assert len(play.round()) == 2


def test_the_rounds_go_deep_and_end_early() -> None:
    gained = [count for seed in range(6) for count in _play(seed, 4, 70)]
    assert min(gained) == 1
    assert max(gained) > 10


class _GatherInPlace(CpuTreeOps):
    """A defect: rows are gathered into the buffer they come from, the last row first."""

    def gather_rows(
        self, source: Tensor, width: int, index: NDArray[np.int32], out: Tensor
    ) -> None:
        rows, count = index.shape
        target = source.array.reshape(-1)[: rows * count * source.shape[-1]]
        dense = source.view((rows, width, source.shape[-1]))
        for row in reversed(range(rows)):
            picked = dense[row, index[row]] * (index[row] >= 0)[:, None]
            target.reshape(rows, count, -1)[row] = picked
        out.array[:] = target.reshape(out.shape)


def _swap_words(packed: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
    return UNPACK(packed[:, :, ::-1].copy(), width)


def _see_all_before(packed: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
    there = UNPACK(packed, width).any(axis=-1, keepdims=True)
    before: NDArray[np.bool_] = np.tri(width, dtype=np.bool_)
    return before & there


def _depth_is_the_index(packed: NDArray[np.int32]) -> NDArray[np.intp]:
    index: NDArray[np.intp] = np.tile(np.arange(packed.shape[1]), (len(packed), 1))
    return index


def _fails(ops: TreeOps | None = None, rows: int = 3) -> bool:
    try:
        for seed in range(5):
            _play(seed, rows, 40, ops)
    except AssertionError:
        return True
    return False


UNPACK = token_trees.unpack_mask


def test_hidden_states_gathered_in_place_are_caught() -> None:
    assert not _fails()
    assert _fails(_GatherInPlace())
    # One row alone is safe: it takes a batch to show.
    assert not _fails(_GatherInPlace(), rows=1)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("unpack_mask", _swap_words),
        ("unpack_mask", _see_all_before),
        ("node_depths", _depth_is_the_index),
    ],
)
def test_a_wrong_mask_or_position_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(token_trees, name, broken)
    assert _fails()


def test_a_path_that_is_not_committed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuCacheStorage, "commit_path", lambda *_: None)
    assert _fails()
