import numpy as np
import pytest

from hearth.runtime.batch import RowMove
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.cpu.ops import CpuCacheStorage
from hearth.runtime.device.open import open_device
from hearth.runtime.errors import HearthError
from hearth.runtime.reference.ops import PageCopy
from hearth.runtime.tensors.tensor import Tensor


def test_the_cpu_is_never_ahead_of_the_host() -> None:
    device = open_device("cpu")
    assert (device.kind, device.steps_ahead, device.stream.handle) == ("cpu", 0, 0)
    device.stream.synchronize()
    device.close()


def test_memory_is_zeroed_and_constants_are_not_copied() -> None:
    device = CpuDevice()
    assert device.zeros("x", (2, 3), np.dtype(np.float16)).array.tolist() == [[0.0] * 3] * 2
    table = np.arange(4)
    assert device.constant("table", table).array is table


def test_a_mark_is_reached_and_buffers_are_read_from_their_beginning() -> None:
    device = CpuDevice()
    assert device.record_event().query()
    device.record_event().wait()
    out = np.zeros((2, 2), np.float32)
    device.fetch(device.constant("x", np.arange(6, dtype=np.float32)), out)
    assert out.tolist() == [[0, 1], [2, 3]]


def test_memory_that_cannot_be_had_is_named() -> None:
    with pytest.raises(HearthError) as caught:
        CpuDevice().zeros("k_cache_0", (1 << 50,), np.dtype(np.float32))
    assert (caught.value.code, caught.value.field) == ("out_of_memory", "k_cache_0")


FLOAT = np.dtype(np.float32)
ROWS, HEADS, SLOTS, DIM = 3, 2, 6, 4


def _storage() -> tuple[CpuCacheStorage, list[Tensor]]:
    """Two buffers; every element of row r of buffer b is 10 b + r + 1."""
    buffers = []
    for number in range(2):
        array = np.zeros((ROWS, HEADS, SLOTS, DIM), FLOAT)
        array += np.arange(1, ROWS + 1, dtype=FLOAT)[:, None, None, None] + 10 * number
        buffers.append(Tensor(f"cache_{number}", array))
    return CpuCacheStorage(buffers, HEADS, DIM), buffers


@pytest.mark.parametrize("start", [[2, 2], [0, 4]])
def test_new_rows_go_behind_each_rows_start(start: list[int]) -> None:
    storage, buffers = _storage()
    fresh = [Tensor("new", np.full((2, HEADS, 2, DIM), -number - 1, FLOAT)) for number in range(2)]
    storage.write(fresh, Tensor("start", np.array([*start, 0])), (2, 2, SLOTS))
    for number, tensor in enumerate(buffers):
        for row in range(ROWS):
            written = tensor.array[row] == -number - 1
            slots = range(start[row], start[row] + 2) if row < 2 else range(0)
            assert written.all(axis=(0, 2)).tolist() == [slot in slots for slot in range(SLOTS)]


def test_a_path_is_committed_in_every_buffer_and_row() -> None:
    storage, buffers = _storage()
    for tensor in buffers:
        tensor.array[:] += np.arange(SLOTS, dtype=FLOAT)[:, None] * 100
    before = [tensor.array.copy() for tensor in buffers]
    nodes = np.array([[0, 2, 4], [0, -1, -1], [0, 1, 3]], np.int32)
    storage.commit_path(nodes, [1, 4, 0], SLOTS)
    sources = [[0, 1, 3, 5, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 3, 3, 4, 5]]
    for tensor, old in zip(buffers, before, strict=True):
        for row, slots in enumerate(sources):
            assert np.array_equal(tensor.array[row], old[row][:, slots])


def test_a_path_is_committed_in_the_bucket_in_use() -> None:
    storage, buffers = _storage()
    flat = buffers[0].array.reshape(-1)
    flat[:] = np.arange(flat.size)
    storage.commit_path(np.array([[0, 2], [0, 1]], np.int32), [1, 0], 4)
    view = np.arange(flat.size, dtype=FLOAT)[: 2 * HEADS * 4 * DIM].reshape(2, HEADS, 4, DIM)
    view[0, :, 2] = view[0, :, 3]
    assert flat[: view.size].tolist() == view.reshape(-1).tolist()
    assert flat[view.size :].tolist() == list(range(view.size, flat.size))


def test_rows_move_in_every_buffer() -> None:
    storage, buffers = _storage()
    storage.move([RowMove(1, 0, 3), RowMove(2, 1, SLOTS)], (SLOTS, SLOTS))
    for number, tensor in enumerate(buffers):
        first, second, _ = tensor.array[:, :, :, 0] - 10 * number
        assert first.tolist() == [[2, 2, 2, 1, 1, 1]] * HEADS
        assert (second == 3).all()


def test_slots_of_a_row_are_zeroed_alone() -> None:
    storage, buffers = _storage()
    storage.zero(1, 2, 5, SLOTS)
    for tensor in buffers:
        assert (tensor.array == 0).nonzero()[0].tolist() == [1] * HEADS * 3 * DIM
        assert not tensor.array[1, :, 2:5].any()


def test_new_rows_go_to_the_places_from_the_first_on() -> None:
    storage, buffers = _storage()
    fresh = [Tensor("new", np.full((2, HEADS, 2, DIM), -1, FLOAT)) for _ in buffers]
    storage.write(fresh, Tensor("start", np.array([4, 1, 0])), (2, 2, SLOTS), 1)
    for tensor in buffers:
        written = [row.any(axis=(0, 2)).nonzero()[0].tolist() for row in tensor.array == -1]
        assert written == [[], [4, 5], [1, 2]]


def test_a_row_is_copied_out_and_in() -> None:
    storage, buffers = _storage()
    arrays = storage.read_row(2, 4, SLOTS)
    assert [array.shape for array in arrays] == [(HEADS, 4, DIM)] * 2
    storage.zero(2, 0, SLOTS, SLOTS)
    storage.write_row(0, arrays, SLOTS)
    for number, tensor in enumerate(buffers):
        assert (tensor.array[0, :, :4] == 10 * number + 3).all()
        assert (tensor.array[0, :, 4:] == 10 * number + 1).all()


def test_pages_are_saved_from_a_row_and_loaded_into_another_in_any_bucket() -> None:
    storage, buffers = _storage()
    pool = Tensor.zeros("pages", (2, 2, HEADS, 4, DIM), FLOAT)
    for number, tensor in enumerate(buffers):
        tensor.array[1] += np.arange(SLOTS, dtype=FLOAT)[:, None] * 100 + number
    saved = [tensor.array[1].copy() for tensor in buffers]
    storage.save(pool, [PageCopy(1, 0, 1, 2, 3), PageCopy(0, 2, 1, 1, 2)], SLOTS)
    assert not pool.array[0, :, :, :2].any()
    for tensor in buffers:
        tensor.array[...] = 0
    storage.load(pool, [PageCopy(1, 1, 2, 0, 2), PageCopy(0, 2, 0, 3, 1)], 4)
    for tensor, known in zip(buffers, saved, strict=True):
        view = tensor.view((ROWS, HEADS, 4, DIM))
        assert np.array_equal(view[2, :, :2], known[:, 3:5])
        assert np.array_equal(view[0, :, 3], known[:, 1])
        assert np.count_nonzero(view) == np.count_nonzero(known[:, 3:5]) + known[:, 1].size


@pytest.mark.parametrize(
    ("shape", "copy"),
    [
        ((2, 2, HEADS, 4, DIM), PageCopy(2, 0, 0, 0, 1)),
        ((2, 2, HEADS, 4, DIM), PageCopy(0, 2, 0, 0, 3)),
        ((2, 2, HEADS, 4, DIM), PageCopy(0, 0, 3, 0, 1)),
        ((2, 2, HEADS, 4, DIM), PageCopy(0, 0, 0, 4, 3)),
        ((2, 2, HEADS, 4, DIM), PageCopy(0, 0, 0, -1, 1)),
        ((2, 3, HEADS, 4, DIM), PageCopy(0, 0, 0, 0, 1)),
        ((2, 2, HEADS, 4, DIM + 1), PageCopy(0, 0, 0, 0, 1)),
    ],
)
def test_a_copy_beyond_a_page_or_a_row_is_refused(shape: tuple[int, ...], copy: PageCopy) -> None:
    storage, buffers = _storage()
    before = [tensor.array.copy() for tensor in buffers]
    pool = Tensor("pages", np.full(shape, -1, FLOAT))
    for act in (storage.save, storage.load):
        with pytest.raises(HearthError, match="has no room"):
            act(pool, [copy], SLOTS)
    assert (pool.array == -1).all()
    assert all(np.array_equal(t.array, b) for t, b in zip(buffers, before, strict=True))
