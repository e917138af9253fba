import mmap

from hearth.daemon.door.curve_socket import Growth, memory_of_process


class Process:
    def __init__(self) -> None:
        self.bytes = 100

    def __call__(self) -> int:
        return self.bytes


def test_growth_counts_and_not_size() -> None:
    process = Process()
    growth = Growth(process)
    process.bytes = 150
    assert not growth.exceeds(50)
    process.bytes = 151
    assert growth.exceeds(50)


def test_what_cannot_be_given_back_counts_no_more() -> None:
    process = Process()
    growth = Growth(process)
    process.bytes = 40
    growth.forgive()
    process.bytes = 151
    assert growth.exceeds(50), "less than at the start is no new start"
    growth.forgive()
    assert not growth.exceeds(50)
    process.bytes = 202
    assert growth.exceeds(50)


def test_no_bound_is_never_exceeded() -> None:
    process = Process()
    growth = Growth(process)
    process.bytes = 1 << 40
    assert not growth.exceeds(0)


def test_memory_that_is_touched_counts() -> None:
    before = memory_of_process()
    # Pages of its own: an allocator that has memory left would not grow.
    block = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block[:: mmap.PAGESIZE] = b"x" * (len(block) // mmap.PAGESIZE)
    assert memory_of_process() - before >= len(block) // 2
    block.close()
