from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hearth.runtime.device.cpu.ops import CpuImageOps, CpuStepOps
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.walks import CudaPendingPaths, RoundPace, _PathSlot
from hearth.runtime.device.device import PathShape, StepBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device.image_buffers import ROW_POSITIONS, rotary_tables
from tests.runtime.device.image_buffers import ROWS as IMAGE_ROWS

pytestmark = pytest.mark.gpu

VOCAB, ROWS, CHUNK = 50, 4, 7
MASKED = 0.5
FLOAT = np.dtype(np.float32)
HALF = np.dtype(np.float16)
BFLOAT = np.dtype(ml_dtypes.bfloat16)
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)


def host_buffers(
    hidden: int, table: np.dtype[Any], out: np.dtype[Any], index: np.dtype[Any]
) -> StepBuffers:
    rng = np.random.default_rng(hidden)
    return StepBuffers(
        embedding=Tensor("table", rng.standard_normal((VOCAB, hidden)).astype(table)),
        next_tokens=Tensor("next", np.array([3, -1, 49, 0], np.int32)),
        inputs_embeds=Tensor.zeros("embeds", (ROWS, CHUNK, hidden), out),
        attention_pos_id=Tensor("positions", np.full((ROWS, CHUNK), 9, index)),
        last_token_ids=Tensor("select", np.full((ROWS, 1), 9, index)),
        lengths=Tensor("start", np.array([5, 0, 11, 2], index)),
        tree_mask=Tensor("mask", rng.random((ROWS, CHUNK, CHUNK)) < MASKED) if hidden % 2 else None,
        packed_mask=Tensor("packed", np.full((ROWS, CHUNK, 1), 77, np.int32)),
    )


def on_gpu(gpu: CudaDevice, buffers: StepBuffers) -> StepBuffers:
    tensors: list[Any] = [
        None if tensor is None else gpu.constant(tensor.name, tensor.array) for tensor in buffers
    ]
    return StepBuffers(*tensors)


def assert_equal(gpu: CudaDevice, actual: StepBuffers, expected: StepBuffers) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        if got is None or wanted is None:
            assert got is wanted
            continue
        assert gpu.read(got).tobytes() == wanted.array.tobytes(), wanted.name


TYPES = [
    (1, FLOAT, FLOAT, INT64),
    (257, HALF, HALF, INT32),
    (256, BFLOAT, BFLOAT, INT64),
    (64, HALF, FLOAT, INT32),
    (64, FLOAT, HALF, INT64),
    (257, BFLOAT, FLOAT, INT64),
    (257, FLOAT, BFLOAT, INT32),
    (33, HALF, BFLOAT, INT64),
]


@pytest.mark.parametrize(("hidden", "table", "out", "index"), TYPES)
def test_prefill_feeds_ragged_rows(
    gpu: CudaDevice,
    hidden: int,
    table: np.dtype[Any],
    out: np.dtype[Any],
    index: np.dtype[Any],
) -> None:
    host = host_buffers(hidden, table, out, index)
    device = on_gpu(gpu, host)
    token_ids = np.random.default_rng(0).integers(0, VOCAB, (3, 5))
    for first in (None, [7, 0, 40]):
        CpuStepOps().feed_prefill(host, token_ids, [5, 1, 3], first)
        gpu.ops.feed_prefill(device, token_ids, [5, 1, 3], first)
        assert_equal(gpu, device, host)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("wide", [3, 72])
def test_entries_are_fed_with_their_hidden_states(
    gpu: CudaDevice, types: tuple[int, Any, Any, Any], wide: int
) -> None:
    host, rng, out = host_buffers(*types), np.random.default_rng(wide), types[2]
    device, cpu = on_gpu(gpu, host), CpuStepOps()
    source = Tensor("source", rng.standard_normal((4, 6, wide)).astype(out))
    states = Tensor("states", np.ones((ROWS, CHUNK, wide), out))
    found = (source, states, Tensor("grown", np.full(ROWS, 77, types[3])))
    there = [gpu.constant(one.name, one.array) for one in found]
    for rows, width in ((3, 5), (4, 1), (1, 7), (3, 5)):
        tokens = rng.integers(0, VOCAB, (rows, width))
        places = rng.integers(-1, 24, (rows, width)).astype(np.int32)
        lengths = rng.integers(0, width + 1, rows).tolist()
        given = (tokens.tolist(), lengths, [7, 0, 40, 3][:rows], places.tolist())
        filled = [5, 0, 9, 2][:rows]
        for ops, buffers, tensors in ((cpu, host, found), (gpu.ops, device, there)):
            ops.put_entries(buffers, *given, filled=filled)
            ops.feed_entries(buffers, tensors[0], tensors[1], tensors[2], (rows, width))
        assert_equal(gpu, device, host)
        for got, wanted in zip(there[1:], found[1:], strict=True):
            assert gpu.read(got).tobytes() == wanted.array.tobytes()


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_what_walks_find_is_entered_behind_the_entries_before_it(
    gpu: CudaDevice, types: tuple[int, Any, Any, Any]
) -> None:
    host, levels, each, width = host_buffers(*types), 9, 6, 8
    device, cpu = on_gpu(gpu, host), CpuStepOps()
    source = Tensor("source", np.random.default_rng(0).standard_normal((4, width, 8)).astype(HALF))
    states = Tensor("states", np.ones((ROWS, CHUNK, 8), HALF))
    found = (source, states, Tensor("grown", np.full(ROWS, 77, types[3])))
    there = [gpu.constant(one.name, one.array) for one in found]
    slot = _PathSlot(gpu.context, gpu.memory, (ROWS, levels))
    paths = CudaPendingPaths(slot, gpu.stream, [-1] * 3, RoundPace())
    base = gpu.constant("base", np.array([40, 21, 33, 99], types[3]))
    # Of the fourth row, which is padding, nothing is read; the second has failed.
    slot.paths.array[:, 0] = (3, -1, 6, 5)
    slot.paths.array[:, 1:] = np.arange(levels)
    slot.paths.array[0, 1:4] = (0, 2, 7)
    slot.tokens[:] = np.arange(ROWS * levels).reshape(ROWS, levels)
    blank = [[0] * each] * 4
    gpu.ops.put_entries(device, blank, [2, 1, 1, 1], [0] * 4, blank, filled=[5, 3, 0, 0])
    gpu.ops.enter_paths(device, paths, base, PathShape(rows=3, batch=4, entries=each, width=width))
    tokens = [[0, 1, 2, 0, 0, 0], blank[1], list(range(18, 24)), blank[3]]
    places = [[0, 2, 7, -1, -1, -1], [-1] * 6, list(range(16, 22)), [-1] * 6]
    # The second one has a length of 0 and grows by none; the host says so of padding as well.
    cpu.put_entries(host, tokens, [3, 0, 6, 1], [37, 21, 27, 0], places, filled=[7, 4, 1, 0])
    for ops, buffers, tensors in ((cpu, host, found), (gpu.ops, device, there)):
        ops.feed_entries(buffers, tensors[0], tensors[1], tensors[2], (4, each))
    assert_equal(gpu, device, host)
    for got, wanted in zip(there[1:], found[1:], strict=True):
        assert gpu.read(got).tobytes() == wanted.array.tobytes()


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 1024, 1500])
def test_the_packed_mask_of_a_chunk_is_causal(gpu: CudaDevice, width: int) -> None:
    host = host_buffers(8, HALF, HALF, INT64)._replace(
        inputs_embeds=Tensor.zeros("embeds", (2, width, 8), HALF),
        attention_pos_id=Tensor.zeros("positions", (2, width), INT64),
        packed_mask=Tensor("packed", np.full((2, width, -(-width // 32)), 77, np.int32)),
    )
    device = on_gpu(gpu, host)
    token_ids = np.random.default_rng(0).integers(0, VOCAB, (2, width))
    CpuStepOps().feed_prefill(host, token_ids, [width, 1])
    gpu.ops.feed_prefill(device, token_ids, [width, 1])
    assert_equal(gpu, device, host)


@pytest.mark.parametrize(("hidden", "table", "out", "index"), TYPES)
def test_decode_feeds_newest_tokens_and_takes_a_failed_one_as_token_0(
    gpu: CudaDevice,
    hidden: int,
    table: np.dtype[Any],
    out: np.dtype[Any],
    index: np.dtype[Any],
) -> None:
    rows = 1 if hidden == 1 else ROWS
    host = host_buffers(hidden, table, out, index)
    device = on_gpu(gpu, host)
    gpu.ops.feed_decode(device, rows)
    host.next_tokens.array[1] = 0
    CpuStepOps().feed_decode(host, rows)
    host.next_tokens.array[1] = -1
    assert_equal(gpu, device, host)


@pytest.mark.parametrize("index", [INT32, INT64])
def test_lengths_are_set_and_advanced(gpu: CudaDevice, index: np.dtype[Any]) -> None:
    start = gpu.constant("start", np.full(300, 7, index))
    gpu.ops.set_lengths(start, [4, 0, 9])
    assert gpu.read(start).tolist() == [4, 0, 9] + [0] * 297
    gpu.ops.advance(start, 2)
    gpu.ops.advance(start, 299)
    assert gpu.read(start).tolist() == [6, 2, 10] + [1] * 296 + [0]


def test_a_step_larger_than_its_buffers_is_refused(gpu: CudaDevice) -> None:
    device = on_gpu(gpu, host_buffers(8, HALF, HALF, INT64))
    with pytest.raises(HearthError, match="exceed"):
        gpu.ops.feed_prefill(device, np.zeros((4, 8), np.int64), [8] * 4)
    with pytest.raises(HearthError, match="exceed"):
        gpu.ops.feed_decode(device, 5)


def test_uploads_beyond_the_ring_arrive_in_order(gpu: CudaDevice) -> None:
    target = gpu.zeros("target", (1 << 20,), INT64)
    expected = np.arange(1 << 20)
    gpu.ring.upload(target.address, -expected)
    gpu.ring.upload(target.address, expected)
    assert (gpu.read(target) == expected).all()


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
    assert len(ROW_POSITIONS) == IMAGE_ROWS
    assert (gpu.read(found.cos) == wanted.cos.array).all()
    assert (gpu.read(found.sin) == wanted.sin.array).all()
