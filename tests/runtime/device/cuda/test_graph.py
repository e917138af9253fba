import subprocess
import sys

import numpy as np
import pytest

from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.stream import CudaEvent
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.tensor import Tensor

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
