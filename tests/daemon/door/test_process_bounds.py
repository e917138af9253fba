import mmap
import os

from daemon.door.process_bounds import ProcessBounds, Use, use_of_process


class Process:
    def __init__(self) -> None:
        self.bytes = 100
        self.files = 9

    def __call__(self) -> Use:
        return Use(self.bytes, self.files)


def test_growth_counts_and_not_size() -> None:
    process = Process()
    bounds = ProcessBounds(50, 99, process)
    process.bytes = 150
    assert not bounds.exceeded()
    process.bytes = 151
    assert bounds.exceeded()


def test_what_cannot_be_given_back_counts_no_more() -> None:
    process = Process()
    bounds = ProcessBounds(50, 99, process)
    process.bytes = 40
    bounds.forgive()
    process.bytes = 151
    assert bounds.exceeded(), "less than at the start is no new start"
    bounds.forgive()
    assert not bounds.exceeded()
    process.bytes = 202
    assert bounds.exceeded()


def test_no_bound_of_memory_is_never_exceeded_and_files_count_still() -> None:
    process = Process()
    bounds = ProcessBounds(0, 99, process)
    process.bytes, process.files = 1 << 40, 99
    assert not bounds.exceeded()
    process.files = 100
    assert bounds.exceeded()


def test_memory_that_is_touched_and_files_that_are_open_count() -> None:
    before = use_of_process()
    # Pages of its own: an allocator that has memory left would not grow.
    block = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block[:: mmap.PAGESIZE] = b"x" * (len(block) // mmap.PAGESIZE)
    low, high = os.dup(0), os.dup(0)
    os.close(low)
    after = use_of_process()
    os.close(high)
    assert after.memory - before.memory >= len(block) // 2
    block.close()
    assert after.files == before.files + 1, "although the lowest descriptor is free"
