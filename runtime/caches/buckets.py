from runtime.errors import HearthError

SMALLEST_BUCKET = 256


def bucket_sizes(capacity: int) -> tuple[int, ...]:
    """Slots per row that a cache may use: 256, 512, 1024, ... and at last `capacity` itself."""
    sizes = []
    size = SMALLEST_BUCKET
    while size < capacity:
        sizes.append(size)
        size *= 2
    return (*sizes, capacity)


def bucket_for(slots: int, capacity: int) -> int:
    """The smallest bucket with `slots`; raises `capacity_exceeded` when there is none."""
    for size in bucket_sizes(capacity):
        if size >= slots:
            return size
    raise HearthError(
        "capacity_exceeded", f"a row needs {slots} cache slots, a row has {capacity}", "max_tokens"
    )
