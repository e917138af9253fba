"""Captured launches and events on a GPU, and chains by the kernel against the NumPy form."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from hearth.runtime.device.cpu.tree_ops import CpuTreeOps
from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.stream import CudaEvent
from hearth.runtime.device.device import ChainBuffers, StepBuffers, TreeBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device.cuda.tree_buffers import (
    FLOAT,
    HALF,
    HIDDEN,
    INT32,
    ROWS,
    VOCAB,
    assert_same,
    on_gpu,
    step_buffers,
    tree_buffers,
)

pytestmark = pytest.mark.gpu

INT64 = np.dtype(np.int64)


def test_a_graph_repeats_what_was_captured(gpu: CudaDevice) -> None:
    start = gpu.zeros("start", (4,), INT64)
    gpu.ops.advance(start, 4)
    capture = gpu.capture()
    with capture:
        gpu.ops.advance(start, 2)
        gpu.ops.advance(start, 3)
    graph = capture.graph
    assert graph.nodes == 2
    # A capture runs nothing.
    assert gpu.read(start).tolist() == [1, 1, 1, 1]
    for _ in range(3):
        graph.launch(gpu.stream)
    assert gpu.read(start).tolist() == [7, 7, 4, 1]
    graph.close()
    graph.close()


def _advance_and_fail(gpu: CudaDevice, start: Tensor) -> None:
    gpu.ops.advance(start, 4)
    raise ValueError("mine")


def test_a_failed_capture_leaves_the_stream_usable(gpu: CudaDevice) -> None:
    start = gpu.zeros("start", (4,), INT64)
    gpu.ops.advance(start, 0 + 1)
    with pytest.raises(HearthError, match="cuStreamSynchronize"), gpu.capture():
        gpu.stream.synchronize()
    capture = gpu.capture()
    with pytest.raises(ValueError, match="mine"), capture:
        _advance_and_fail(gpu, start)
    with pytest.raises(HearthError, match="nothing was captured"):
        _ = capture.graph
    gpu.ops.advance(start, 1)
    assert gpu.read(start).tolist() == [2, 0, 0, 0]


def test_a_capture_that_became_invalid_is_a_named_error(gpu: CudaDevice) -> None:
    driver = gpu.context.driver
    with pytest.raises(HearthError, match="cannot be captured: cuStreamEndCapture"), gpu.capture():
        driver.function("cuStreamSynchronize")(gpu.stream.native)
    gpu.stream.synchronize()


def test_events_order_and_time_work(gpu: CudaDevice) -> None:
    first, last = CudaEvent(gpu.context, timing=True), CudaEvent(gpu.context, timing=True)
    target = gpu.zeros("target", (1 << 22,), INT64)
    first.record(gpu.stream)
    gpu.stream.zero(target.address, target.nbytes)
    last.record(gpu.stream)
    last.wait()
    assert first.query()
    assert last.query()
    assert 0 < last.elapsed_ms(first) < 1000
    first.close()
    last.close()
    last.close()


def test_too_much_memory_names_the_tensor(gpu: CudaDevice) -> None:
    with pytest.raises(HearthError, match="no memory for huge, 8796093022208 bytes: cuMemAlloc"):
        gpu.zeros("huge", (1 << 40,), INT64)
    assert gpu.zeros("small", (8,), INT64).address % 256 == 0


@pytest.mark.whole_gpu
def test_memory_is_zeroed_and_given_back(gpu: CudaDevice) -> None:
    free, total = gpu.context.memory()
    assert 0 < free < total
    memory = CudaMemory(gpu.context, reserve=256 << 20)
    tensor = memory.zeros("zeros", (1 << 20,), INT64)
    assert not gpu.read(tensor).any()
    pinned = memory.pinned_zeros("pinned", (3, 5), INT64)
    assert pinned.array.shape == (3, 5)
    assert gpu.context.memory()[0] <= free - (256 << 20)
    memory.close()
    assert gpu.context.memory()[0] > free - (64 << 20)


def test_there_is_no_gpu_99() -> None:
    with pytest.raises(HearthError, match="there is no GPU 99"):
        open_cuda_device(99)


STICKY = """
import ctypes
from hearth.runtime.device.cuda.cuda_device import open_cuda_device
from hearth.runtime.errors import HearthError
import numpy as np
gpu = open_cuda_device()
tensor = gpu.zeros("start", (4,), np.dtype(np.int64))
gpu.ops.advance(tensor, 4)
tensor.address = 64
wrong = gpu.ops._prepare(tensor, "advance", ctypes.c_int32())
wrong.arguments[1].value = 4
wrong.launch(1)
for attempt in range(2):
    try:
        gpu.stream.synchronize()
    except HearthError as error:
        print(error.code, error.message)
gpu.close()
"""


def test_a_sticky_error_is_device_lost(gpu: CudaDevice) -> None:
    assert gpu.kind == "cuda"
    done = subprocess.run(
        [sys.executable, "-c", STICKY], capture_output=True, text=True, timeout=100, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("device_lost cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL")


SIZE = 1 << 22


def test_what_was_queued_before_an_event_can_be_fetched_behind_it(gpu: CudaDevice) -> None:
    numbers = np.arange(SIZE, dtype=np.float32)
    tensor = gpu.constant("numbers", numbers)
    copied = gpu.zeros("copied", (SIZE,), numbers.dtype)
    out = np.zeros((SIZE // 4, 2), np.float32)
    for factor in (1, 2):
        gpu.image_ops.splice(copied.part("copied", 0, (1, SIZE)), 0, numbers[None] * factor)
        event = gpu.record_event()
        event.wait()
        assert event.query()
        gpu.fetch(copied, out)
        assert np.array_equal(out.reshape(-1), numbers[: SIZE // 2] * factor)
    gpu.fetch(tensor.part("end", SIZE - 4, (4,)), out[0, :1])
    assert out[0, 0] == SIZE - 4


def test_a_copy_into_pieces_is_refused(gpu: CudaDevice) -> None:
    tensor = gpu.zeros("x", (8,), np.dtype(np.float32))
    with pytest.raises(HearthError):
        gpu.fetch(tensor, np.zeros((4, 4), np.float32)[:, :2])


def test_spans_are_measured_beside_each_other(gpu: CudaDevice) -> None:
    tensor = gpu.zeros("x", (SIZE,), np.dtype(np.float32))
    spans = []
    # The first of a kind is set up on the way.
    gpu.copy(tensor, None)
    gpu.record_event().wait()
    for copies in (1, 500):
        spans.append(gpu.span())
        for _ in range(copies):
            gpu.copy(tensor, None)
        spans[-1].end()
    gpu.record_event().wait()
    one, many = (span.seconds for span in spans)
    assert one is not None
    assert many is not None
    assert 0 < one < many


NODES = 5


def chain_buffers(vocab: int, index: Any, *, mapped: bool, packed: bool) -> ChainBuffers:
    rng = np.random.default_rng(vocab)
    full_ids = Tensor("full ids", rng.integers(0, VOCAB, vocab).astype(np.int32))
    hidden = (ROWS, 1, HIDDEN)
    return ChainBuffers(
        step_buffers(1, np.dtype(index), masked=not packed, packed=packed),
        Tensor.zeros("logits", (ROWS, 1, vocab), FLOAT),
        Tensor.zeros("hidden out", hidden, HALF),
        Tensor("hidden in", np.full(hidden, 7, HALF)),
        full_ids if mapped else None,
        tree_buffers(NODES + 2),
        Tensor("base", rng.integers(0, 1000, ROWS).astype(index)),
    )


def device_chain(gpu: CudaDevice, host: ChainBuffers) -> ChainBuffers:
    step, trees = StepBuffers(*on_gpu(gpu, host.step)), TreeBuffers(*on_gpu(gpu, host.trees))
    one, two, three, four = on_gpu(gpu, host[1:5])
    return ChainBuffers(step, one, two, three, four, trees, *on_gpu(gpu, host[6:]))


@pytest.mark.parametrize("kind", ["plain", "ties", "not finite"])
@pytest.mark.parametrize(
    ("vocab", "index", "mapped", "packed"),
    [(40, INT64, False, True), (1024, INT32, True, False), (32_000, INT64, True, True)],
)
def test_each_level_is_a_node_and_feeds_the_next_step(
    gpu: CudaDevice, vocab: int, index: Any, kind: str, *, mapped: bool, packed: bool
) -> None:
    rng, cpu = np.random.default_rng(5), CpuTreeOps()
    host = chain_buffers(vocab, index, mapped=mapped or vocab > VOCAB, packed=packed)
    device = device_chain(gpu, host)
    for rows in (ROWS, 1, 3):
        for level in range(NODES - 1):
            logits = rng.standard_normal(host.logits.shape).astype(np.float32)
            if kind == "ties":
                logits = np.round(logits)
            if kind == "not finite":
                logits[rng.random(logits.shape) < 0.3] = np.nan
                logits[rng.random(logits.shape) < 0.1] = -np.inf
                logits[:, :, -1] = 3.0
            hidden = rng.standard_normal(host.hidden_states.shape).astype(np.float16)
            for on, buffers in ((None, host), (gpu, device)):
                for tensor, array in ((buffers.logits, logits), (buffers.hidden_states, hidden)):
                    if on is None:
                        tensor.array[...] = array
                    else:
                        on.put(tensor, array)
            cpu.draft_chain(host, rows, NODES, level)
            gpu.tree_ops.draft_chain(device, rows, NODES, level)
            assert_same(gpu, device.step, host.step)
            assert_same(gpu, device.trees, host.trees)
            assert_same(gpu, device[3:4], host[3:4])


def test_levels_that_a_chain_does_not_have_are_refused(gpu: CudaDevice) -> None:
    device = device_chain(gpu, chain_buffers(40, INT64, mapped=False, packed=True))
    for rows, nodes, level in (
        (0, NODES, 0),
        (ROWS + 1, NODES, 0),
        (1, NODES, NODES - 1),
        (1, 9, 0),
    ):
        with pytest.raises(HearthError, match="have no level"):
            gpu.tree_ops.draft_chain(device, rows, nodes, level)
