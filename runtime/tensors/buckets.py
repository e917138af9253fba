from collections.abc import Sequence

from runtime.config import DeviceKind
from runtime.errors import HearthError

SMALLEST_BUCKET = 256


def bucket_sizes(capacity: int, device: DeviceKind = "cpu") -> tuple[int, ...]:
    """Slots per row that a cache may use: 256, 384, 512, 768, 1024, 2048, ... and `capacity`.

    Attention on a CPU costs by them, filled or not, so there are more where most rows end.
    On a GPU the only size is `capacity`: rows of another stride cannot be re-laid in parallel,
    and each size would need graphs of its own.
    """
    if device != "cpu":
        return (capacity,)
    doubled = doubled_sizes(capacity)
    between = (size + size // 2 for size in doubled[:2])
    return tuple(sorted({*doubled, *(size for size in between if size < capacity)}))


def doubled_sizes(capacity: int) -> tuple[int, ...]:
    """256, 512, 1024, ... and at last `capacity` itself."""
    sizes = []
    size = SMALLEST_BUCKET
    while size < capacity:
        sizes.append(size)
        size *= 2
    return (*sizes, capacity)


def bucket_for(slots: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` with `slots`; raises `capacity_exceeded` when there is none."""
    for size in sizes:
        if size >= slots:
            return size
    raise HearthError(
        "capacity_exceeded", f"a row needs {slots} cache slots, a row has {sizes[-1]}", "max_tokens"
    )
