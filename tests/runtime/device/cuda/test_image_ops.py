from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hearth.runtime.device.cpu.ops import CpuImageOps
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device.image_buffers import ROW_POSITIONS, ROWS, rotary_tables

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("hidden", "place", "count"), [(64, 0, 1), (33, 5, 16), (2048, 90, 38)])
def test_spliced_embeddings_are_those_of_numpy(
    gpu: CudaDevice, dtype: Any, hidden: int, place: int, count: int
) -> None:
    random = np.random.default_rng(hidden)
    before = random.standard_normal((2, 64, hidden)).astype(dtype)
    # What is copied is a part of a larger array, as features of an image are.
    rows = random.standard_normal((3, 64, hidden)).astype(dtype)[1, 7 : 7 + count]
    wanted, found = Tensor("embeds", before.copy()), gpu.constant("embeds", before)
    CpuImageOps().splice(wanted, place, rows)
    gpu.image_ops.splice(found, place, rows)
    assert gpu.read(found).tobytes() == wanted.array.tobytes()
    gpu.image_ops.clear(found, 100)
    CpuImageOps().clear(wanted, 100)
    assert gpu.read(found).tobytes() == wanted.array.tobytes()


def test_more_embeddings_than_pinned_memory_arrive_whole(gpu: CudaDevice) -> None:
    rows = np.random.default_rng(3).standard_normal((6000, 512)).astype(np.float32)
    target = gpu.zeros("embeds", (1, 6000, 512), rows.dtype)
    gpu.image_ops.splice(target, 0, rows)
    assert (gpu.read(target)[0] == rows).all()


def test_embeddings_that_do_not_fit_are_refused(gpu: CudaDevice) -> None:
    target = gpu.zeros("embeds", (1, 4, 8), np.dtype(np.float32))
    with pytest.raises(HearthError, match="do not fit into embeds"):
        gpu.image_ops.splice(target, 3, np.zeros((2, 8), np.float32))


def test_rotary_tables_are_those_of_numpy(gpu: CudaDevice) -> None:
    wanted, found = rotary_tables(Tensor), rotary_tables(gpu.constant)
    # All are queued before one is read: each launch brings positions of its own.
    for row in (2, 0, 1):
        CpuImageOps().fill_rotary(wanted, row, ROW_POSITIONS[row])
        gpu.image_ops.fill_rotary(found, row, ROW_POSITIONS[row])
    assert len(ROW_POSITIONS) == ROWS
    assert (gpu.read(found.cos) == wanted.cos.array).all()
    assert (gpu.read(found.sin) == wanted.sin.array).all()
