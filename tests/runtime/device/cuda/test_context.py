import numpy as np
import pytest

from runtime.device.cuda.cuda_device import CudaDevice

pytestmark = pytest.mark.gpu


def test_what_was_captured_still_runs_after_another_context(gpu: CudaDevice) -> None:
    start = gpu.zeros("start", (2,), np.dtype(np.int64))
    capture = gpu.capture()
    with capture:
        gpu.ops.advance(start, 2)
    assert gpu.settle()
    capture.graph.launch(gpu.stream)
    assert gpu.read(start).tolist() == [1, 1]
    capture.graph.close()


@pytest.mark.whole_gpu
def test_another_context_gives_its_memory_back(gpu: CudaDevice) -> None:
    free, _ = gpu.context.memory()
    assert gpu.settle()
    assert gpu.context.memory()[0] >= free
