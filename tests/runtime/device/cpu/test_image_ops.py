from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.device.cpu.ops import CpuImageOps
from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.positions import RowPositions
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device.image_buffers import PAIRS, ROW_POSITIONS, SLOTS, rotary_tables


def test_embeddings_take_the_place_of_others() -> None:
    buffer = Tensor("inputs_embeds", np.zeros((2, 4, 3), np.float32))
    CpuImageOps().splice(buffer, 3, np.arange(6, dtype=np.float32).reshape(2, 3))
    found = buffer.array.reshape(-1, 3)
    assert found[3:5].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.flatnonzero(found.any(axis=1)).tolist() == [3, 4]
    CpuImageOps().clear(buffer, 4)
    assert np.flatnonzero(buffer.array.reshape(-1, 3).any(axis=1)).tolist() == [4]


@pytest.mark.parametrize(
    ("place", "rows"),
    [
        (0, np.zeros((1, 4), np.float32)),
        (0, np.zeros((1, 3), np.float16)),
        (0, np.zeros(3, np.float32)),
        (7, np.zeros((2, 3), np.float32)),
        (-1, np.zeros((1, 3), np.float32)),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(place: int, rows: NDArray[Any]) -> None:
    buffer = Tensor("inputs_embeds", np.zeros((2, 4, 3), np.float32))
    with pytest.raises(HearthError, match="do not fit into inputs_embeds") as caught:
        CpuImageOps().splice(buffer, place, rows)
    assert caught.value.code == "internal"
    assert not buffer.array.any()


@pytest.mark.parametrize("positions", ROW_POSITIONS)
def test_each_pair_of_a_slot_is_that_of_its_position(positions: RowPositions) -> None:
    tables = rotary_tables(Tensor)
    CpuImageOps().fill_rotary(tables, 1, positions)
    last = len(tables.cos_of.array) - 1
    for slot in range(SLOTS):
        for pair in range(PAIRS):
            position = slot + positions.delta
            if slot < positions.prompt.shape[1]:
                position = int(positions.prompt[pair % 3, slot])
            position = min(position, last)
            assert tables.cos.array[1, slot, pair] == tables.cos_of.array[position, pair]
            assert tables.sin.array[1, slot, pair] == tables.sin_of.array[position, pair]
    assert (tables.cos.array[[0, 2]] == 9).all()
