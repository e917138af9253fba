from daemon.door.memory_bound import MemoryBound, anonymous_bytes


class Process:
    def __init__(self) -> None:
        self.bytes = 100

    def __call__(self) -> int:
        return self.bytes


def test_growth_counts_and_not_size() -> None:
    process = Process()
    bound = MemoryBound(50, process)
    process.bytes = 150
    assert not bound.exceeded()
    process.bytes = 151
    assert bound.exceeded()


def test_what_cannot_be_given_back_counts_no_more() -> None:
    process = Process()
    bound = MemoryBound(50, process)
    process.bytes = 40
    bound.forgive()
    process.bytes = 151
    assert bound.exceeded(), "less than at the start is no new start"
    bound.forgive()
    assert not bound.exceeded()
    process.bytes = 202
    assert bound.exceeded()


def test_no_bound_is_never_exceeded() -> None:
    process = Process()
    bound = MemoryBound(0, process)
    process.bytes = 1 << 40
    assert not bound.exceeded()


def test_memory_that_is_touched_counts() -> None:
    before = anonymous_bytes()
    block = bytearray(b"x" * (32 << 20))
    assert anonymous_bytes() - before >= len(block) // 2
