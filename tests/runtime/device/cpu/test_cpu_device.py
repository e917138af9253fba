import numpy as np
import pytest

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.open import open_device
from hearth.runtime.errors import HearthError


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
