"""What an op of trees and images queues, without a GPU."""

import ctypes
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.batch import BatchReorder, DirtySlots, RowMove
from hearth.runtime.device.cuda.compiler import KernelCompiler
from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.storage import check_path
from hearth.runtime.device.cuda.tree_ops import CudaTreeOps
from hearth.runtime.device.device import ProposalBuffers, SamplerBuffers, StepBuffers, TreeBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.image_processing.positions import PLAIN, RowPositions
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager
from hearth.runtime.reference.ops import PageCopy
from hearth.runtime.request import RequestOptions, RowRequest
from tests.runtime.arrangements import new_row
from tests.runtime.device.cuda.fake_driver import FakeDriver
from tests.runtime.device.cuda.tree_buffers import (
    FLOAT,
    HALF,
    INT32,
    INT64,
    ROWS,
    Shape,
    on_gpu,
    proposal_buffers,
    step_buffers,
    tree_buffers,
)
from tests.runtime.device.image_buffers import PAIRS, ROW_POSITIONS, SLOTS, rotary_tables


class HostDriver(FakeDriver):
    """A driver whose memory is the host's, so that pinned slots can be written."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []
        self.results["cuModuleLoadData"] = ("module",)
        self.results["cuModuleGetFunction"] = ("kernel",)
        self.CU_MEMHOSTALLOC_PORTABLE = self.CU_MEMHOSTALLOC_DEVICEMAP = 0

    def cuMemAlloc(self, size: int) -> tuple[int, int]:  # noqa: N802 - the library's name
        self._kept.append((ctypes.c_uint8 * size)())
        return 0, ctypes.addressof(self._kept[-1])

    def cuMemHostAlloc(self, size: int, _: int) -> tuple[int, int]:  # noqa: N802 - the library's name
        return self.cuMemAlloc(size)


class NoCompiler(KernelCompiler):
    """Kernels without code: nothing runs them."""

    def __init__(self) -> None:
        pass

    def compile(self, *_: object) -> bytes:
        return b""

    def has(self, *_: object) -> bool:
        return True


class Queue:
    """A device that only counts what is queued: kernels and copies to it."""

    def __init__(self) -> None:
        self.api = HostDriver()
        self.device = CudaDevice(CudaContext(CudaDriver(self.api)), NoCompiler())

    def counts(self) -> tuple[int, int]:
        names = self.api.names()
        self.api.calls.clear()
        assert "cuStreamSynchronize" not in names
        assert "cuEventSynchronize" not in names
        return names.count("cuLaunchKernel"), names.count("cuMemcpyHtoDAsync")

    def grids(self) -> list[tuple[int, ...]]:
        return [call[2:5] for call in self.api.calls if call[0] == "cuLaunchKernel"]


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_an_op_of_a_proposal_is_one_launch(queue: Queue) -> None:
    gpu, shape = queue.device, Shape(8, 10, 6, 32000)
    ops: CudaTreeOps = gpu.tree_ops
    proposal = ProposalBuffers(*on_gpu(gpu, proposal_buffers(shape, HALF, mapped=True)))
    steps = StepBuffers(*on_gpu(gpu, step_buffers(60, INT64)))
    trees = TreeBuffers(*on_gpu(gpu, tree_buffers(60)))
    queue.api.calls.clear()
    ops.begin_proposal(proposal, 3, 10)
    assert queue.grids() == [(16, 3, 1)]
    assert queue.counts() == (1, 0)
    ops.feed_proposal(steps, proposal, steps.lengths, (3, 20, 10))
    assert queue.counts() == (1, 0)
    ops.extend_proposal(proposal, 3, 10, 0, last=False)
    assert queue.grids() == [(16, 30, 1)]
    assert queue.counts() == (1, 0)
    ops.finish_proposal(proposal, trees, [True, False], 60)
    assert queue.grids() == [(64, 2, 1)]
    assert queue.counts() == (1, 0)
    ops.feed_verify(steps, trees, 3, 60)
    assert queue.counts() == (1, 0)
    ops.upload_tree(trees, np.zeros((3, 5), np.int32), np.zeros((3, 5), np.int32))
    assert queue.counts() == (0, 2)
    ops.gather_rows(steps.inputs_embeds, 60, np.zeros((2, 7), np.int32), steps.inputs_embeds)
    assert queue.counts() == (1, 1)
    ops.gather_rows(steps.inputs_embeds, 1, np.full((1, 7), -1, np.int32), steps.inputs_embeds)
    assert queue.counts() == (0, 0)


@pytest.mark.parametrize(("vocab", "parts"), [(1, 1), (2048, 1), (2049, 2), (151936, 32)])
def test_a_warp_can_merge_the_parts_of_a_vocabulary(queue: Queue, vocab: int, parts: int) -> None:
    buffers = proposal_buffers(Shape(1, 1, 1, vocab), HALF, mapped=False)
    proposal = ProposalBuffers(*on_gpu(queue.device, buffers))
    queue.api.calls.clear()
    queue.device.tree_ops.begin_proposal(proposal, 1, 1)
    assert queue.grids() == [(parts, 1, 1)]


def test_lengths_come_along_with_their_launch(queue: Queue) -> None:
    start = queue.device.zeros("start", (300,), INT64)
    queue.api.calls.clear()
    queue.device.ops.set_lengths(start, [3, 4])
    assert queue.counts() == (2, 0)


GREEDY, DRAWN = RequestOptions(), RequestOptions(temperature=1)
PENALISED, REPORTED = RequestOptions(presence_penalty=0.1), RequestOptions(logprobs=1, top_k=3)
SCAN, ROW = (3, ROWS, 1), (ROWS, 1, 1)
# Nine multiprocessors have room for 18 blocks, and the logits of a row suffice for three.
DRAW, REPORT = (2, ROWS, 1), (1, ROWS, 2)


@pytest.mark.parametrize(
    ("params", "grids"),
    [
        (GREEDY, [SCAN]),
        (PENALISED, [SCAN]),
        (structs.replace(DRAWN, min_p=0.1), [SCAN, DRAW]),
        (RequestOptions(logprobs=0), [SCAN, REPORT]),
        (structs.replace(DRAWN, top_p=0.9), [SCAN, DRAW, DRAW]),
        (structs.replace(DRAWN, top_k=5001), [SCAN, DRAW]),
        (REPORTED, [SCAN, REPORT, REPORT]),
    ],
)
def test_a_step_is_sampled_in_as_many_launches_as_its_rows_need(
    queue: Queue, params: RequestOptions, grids: list[tuple[int, ...]]
) -> None:
    sampler = sampler_for(queue, params, nodes=1)
    sampler.sample(ROWS)
    assert queue.grids() == grids
    assert queue.counts() == (len(grids), 0)


def test_rows_that_are_only_checked_and_plain_ones_need_no_draw(queue: Queue) -> None:
    sampler = sampler_for(queue, DRAWN, GREEDY, REPORTED)
    for first, picked, launches in ((0, 1, 2), (1, 1, 1), (1, 2, 3), (2, 0, 1), (0, 3, 3)):
        queue.api.calls.clear()
        sampler.sample(3 - first, first, picked)
        assert queue.counts() == (launches, 0)


def sampler_for(queue: Queue, *params: RequestOptions, nodes: int = 4) -> Any:
    """A sampler over 5,000 tokens with a batch of such rows; the queue begins behind it."""
    gpu = queue.device
    buffers = SamplerBuffers(
        gpu.zeros("logits", (ROWS, nodes, 5000), FLOAT),
        gpu.zeros("start", (ROWS,), INT64),
        gpu.zeros("next", (ROWS,), INT32),
        TreeBuffers(*(gpu.zeros("tree", (ROWS, nodes), INT32) for _ in range(2))),
    )
    sampler = gpu.batch_sampler(buffers)
    rows = [
        RowRequest(token_ids=[1], prompt_length=1, options=structs.replace(each, max_tokens=9))
        for each in params
    ]
    sampler.reorder(BatchReorder.fresh(rows * ROWS if len(rows) == 1 else rows))
    queue.api.calls.clear()
    return sampler


@pytest.mark.parametrize(
    ("width", "params", "grids"),
    [
        (1, GREEDY, [SCAN]),
        (1, DRAWN, [SCAN, DRAW, ROW]),
        (1, PENALISED, [SCAN, ROW]),
        (1, RequestOptions(logprobs=0), [SCAN, REPORT, ROW]),
        (1, REPORTED, [SCAN, REPORT, REPORT, ROW]),
        (3, GREEDY, [(3, 3 * ROWS, 1)]),
        (4, GREEDY, [ROW]),
        (4, DRAWN, [(3, 4 * ROWS, 1), (1, 4 * ROWS, 1), ROW]),
        (113, DRAWN, [ROW]),
    ],
)
def test_all_nodes_are_picked_for_where_multiprocessors_are_enough(
    queue: Queue, width: int, params: RequestOptions, grids: list[tuple[int, ...]]
) -> None:
    assert queue.device.properties.multiprocessors == 9
    sampler = sampler_for(queue, params, nodes=113)
    sampler.verify(ROWS, width)
    assert queue.grids() == grids
    assert queue.counts() == (len(grids), 0)


def test_the_slots_of_all_layers_move_in_one_launch(queue: Queue) -> None:
    gpu = queue.device
    caches = [gpu.zeros("cache", (ROWS, 2, 64, 128), HALF) for _ in range(56)]
    storage = gpu.cache_storage(caches, 2, 128)
    queue.api.calls.clear()
    storage.commit_path(np.array([[0, 3], [0, 1]], np.int32), [5, 7], 64)
    assert queue.grids() == [(1, 2, 56)]
    assert queue.counts() == (1, 1)
    storage.commit_path(np.array([[0, 1], [0, 1]], np.int32), [5, 7], 64)
    assert queue.counts() == (0, 0)


def test_pages_of_all_layers_are_copied_in_few_launches_and_nothing_waits(queue: Queue) -> None:
    gpu = queue.device
    caches = [gpu.zeros("cache", (ROWS, 2, 4096, 128), HALF) for _ in range(56)]
    storage = gpu.cache_storage(caches, 2, 128)
    pool = gpu.zeros("pages", (80, 56, 2, 32, 128), HALF)
    copies = [PageCopy(page, 0, 0, 32 * page, 32) for page in range(80)]
    queue.api.calls.clear()
    storage.save(pool, copies, 4096)
    storage.load(pool, [copies[0], PageCopy(1, 0, 0, 0, 0)], 4096)
    storage.save(pool, [PageCopy(0, 1, 0, 0, 0)], 4096)
    assert queue.grids() == [(4, 64, 56), (4, 16, 56), (4, 1, 56)]
    assert queue.counts() == (3, 0)


def test_rows_are_placed_anew_without_waiting_for_queued_steps(queue: Queue) -> None:
    gpu = queue.device
    config = simulated_config(layers=28, max_batch=ROWS, capacity=64)
    caches = HybridCacheManager(structs.replace(config, device="cuda"), gpu)
    buffers = SamplerBuffers(
        gpu.zeros("logits", (ROWS, 1, 5000), FLOAT),
        caches.lengths,
        gpu.zeros("next", (ROWS,), INT32),
    )
    sampler = gpu.batch_sampler(buffers)
    plain, penalised = (
        RowRequest(token_ids=[1], prompt_length=1, options=options)
        for options in (RequestOptions(), RequestOptions(presence_penalty=1.0))
    )
    for owner in (caches, sampler):
        owner.reorder(BatchReorder.fresh([plain, penalised, plain]))
    caches.commit([5, 6, 7])
    queue.api.calls.clear()
    reorder = BatchReorder(3, [RowMove(1, 0, 6)], [new_row(1, penalised)])
    caches.reorder(reorder._replace(stale=[DirtySlots(1, 0, 9)]))
    # Moves, stale slots of all layers, lengths.
    assert queue.counts() == (3, 0)
    sampler.reorder(reorder)
    # A history and the newest tokens move; a new history and the settings come.
    assert queue.counts() == (3, 2)
    for owner in (caches, sampler):
        owner.reorder(BatchReorder(2))
    assert queue.counts() == (1, 1)


def test_a_path_must_ascend_within_the_slots() -> None:
    path = np.array([[0, 4, -1], [0, 1, 2]], np.int32)
    assert check_path(path, [3, 5], 8)
    assert not check_path(path[1:], [5], 8)
    assert not check_path(path[:0], [], 8)
    for nodes, starts in ((path, [4, 5]), (path, [3, 6]), (path[:, ::-1], [0, 0])):
        with pytest.raises(HearthError, match="do not ascend"):
            check_path(nodes, starts, 8)
    with pytest.raises(HearthError, match="2 paths have 1 starts"):
        check_path(path, [3], 8)


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
