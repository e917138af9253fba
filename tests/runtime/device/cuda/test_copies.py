import numpy as np
import pytest

from hearth.runtime.device.cuda.cuda_device import CudaDevice

pytestmark = pytest.mark.gpu


def test_a_buffer_is_written_copied_and_cleared_in_the_streams_order(gpu: CudaDevice) -> None:
    size = (3 << 20) + 5
    array = np.random.default_rng(0).integers(0, 255, size).astype(np.uint8)
    source, target = (gpu.zeros(name, (size,), array.dtype) for name in ("source", "target"))
    gpu.put(source, array)
    gpu.copy(target, source)
    gpu.put(source, array[::-1])
    assert np.array_equal(gpu.read(target), array)
    gpu.copy(target, source)
    assert np.array_equal(gpu.read(target), array[::-1])
    gpu.copy(target, None)
    assert not gpu.read(target).any()
