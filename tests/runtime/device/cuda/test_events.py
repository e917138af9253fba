import numpy as np
import pytest

from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.errors import HearthError

pytestmark = pytest.mark.gpu
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
