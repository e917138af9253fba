import numpy as np
import pytest

from hearth.bench.contenders.contender import Job
from hearth.bench.contenders.floor import KERNELS, MemoryFloor, plain_passes, repeats


@pytest.mark.parametrize(("size", "threads"), [(1 << 20, 1), (1 << 20, 3), (1 << 17, 2)])
def test_the_threads_share_the_whole_buffer(size: int, threads: int) -> None:
    reader = MemoryFloor(Job(contender="floor", bytes=size, threads=threads))
    reader.step()
    reader.close()
    assert len(reader._parts) == threads
    total = sum(part.nbytes for part in reader._parts)
    assert total >= size
    assert total - size <= threads * 4 * 4096


def test_every_pass_reads_with_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "hearth.bench.contenders.floor.KERNELS",
        (lambda _: seen.append("a"), lambda _: seen.append("b")),
    )
    reader = MemoryFloor(Job(contender="floor", bytes=1 << 28))
    for _ in range(3):
        reader.step()
    reader.close()
    assert seen == ["a", "b", "a"]


def test_kernels_touch_every_value() -> None:
    part = np.ones((8, 16), np.float32)
    for kernel in KERNELS[:2]:
        assert float(np.asarray(kernel(part)).sum()) == part.size
    part[-1, -1] = 2
    assert KERNELS[2](part) == 2


def test_plain_passes_are_those_of_the_last_kernel() -> None:
    assert plain_passes([1, 2, 3, 4, 5, 6, 7]) == [3, 6]


def test_small_buffers_are_read_often() -> None:
    assert repeats(1 << 20) == 256
    assert repeats(1 << 28) == repeats(1 << 31) == 1
