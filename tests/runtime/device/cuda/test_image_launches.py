"""What images queue on a GPU, without one."""

import numpy as np
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.positions import PLAIN, RowPositions
from tests.runtime.device.cuda.test_tree_launches import Queue
from tests.runtime.device.image_buffers import PAIRS, ROW_POSITIONS, SLOTS, rotary_tables

MEBIBYTE = 1 << 20


def test_embeddings_are_copied_to_their_place_by_the_megabyte() -> None:
    queue = Queue()
    gpu = queue.device
    ops, target = gpu.image_ops, gpu.zeros("embeds", (2, 700, 512), np.dtype(np.float32))
    queue.api.calls.clear()
    ops.splice(target, 3, np.zeros((40, 512), np.float32))
    (copy,) = (call for call in queue.api.calls if call[0] == "cuMemcpyHtoDAsync")
    assert (copy[1], copy[3]) == (target.address + 3 * 2048, 40 * 2048)
    queue.counts()
    ops.splice(target, 0, np.zeros((1400, 512), np.float32))
    assert queue.counts() == (0, -(-1400 * 2048 // MEBIBYTE))
    ops.clear(target, 70)
    assert ("cuMemsetD8Async", target.address, 0, 70 * 2048) == queue.api.calls[-1][:4]
    with pytest.raises(HearthError, match="do not fit"):
        ops.splice(target, 0, np.zeros((1, 512), np.float16))


def test_the_tables_of_a_row_are_one_launch() -> None:
    queue = Queue()
    gpu = queue.device
    tables = rotary_tables(gpu.constant)
    queue.api.calls.clear()
    for row, positions in enumerate(ROW_POSITIONS):
        gpu.image_ops.fill_rotary(tables, row, positions)
        assert queue.grids() == [(SLOTS, 1, 1)]
        assert queue.counts() == (1, int(positions is not PLAIN))
        _, launch = gpu.image_ops._rotary[tables]
        arguments = launch.arguments[0]
        assert arguments.cos == tables.cos.address + row * SLOTS * PAIRS * 4
        assert arguments.sin == tables.sin.address + row * SLOTS * PAIRS * 4
        assert (arguments.length, arguments.delta) == (positions.prompt.shape[1], positions.delta)
        assert (arguments.pairs, arguments.last) == (PAIRS, tables.cos_of.shape[0] - 1)
    with pytest.raises(HearthError, match="21 positions in 20 slots"):
        gpu.image_ops.fill_rotary(tables, 0, RowPositions(np.zeros((3, 21), np.int32), 0))


def test_a_model_of_text_takes_no_pinned_memory_for_images() -> None:
    queue = Queue()
    before = queue.device.memory.pinned.used
    assert "image_ops" not in vars(queue.device)
    assert queue.device.image_ops is queue.device.image_ops
    assert queue.device.memory.pinned.used == before + 8 * MEBIBYTE
