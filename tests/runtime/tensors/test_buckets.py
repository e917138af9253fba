import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.profiles import bucket_for, bucket_sizes


@pytest.mark.parametrize(
    ("capacity", "sizes"),
    [
        (100, (100,)),
        (256, (256,)),
        (257, (256, 257)),
        (384, (256, 384)),
        (600, (256, 384, 512, 600)),
        (2048, (256, 384, 512, 768, 1024, 2048)),
        (3000, (256, 384, 512, 768, 1024, 2048, 3000)),
    ],
)
def test_buckets_are_nearer_to_each_other_where_most_rows_end(
    capacity: int, sizes: tuple[int, ...]
) -> None:
    assert bucket_sizes(capacity) == sizes


def test_a_gpu_has_one_size() -> None:
    assert bucket_sizes(2048, "cuda") == (2048,)


@given(st.integers(1, 10_000), st.data())
def test_the_smallest_bucket_that_fits_is_taken(capacity: int, data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, capacity))
    bucket = bucket_for(slots, bucket_sizes(capacity))
    assert slots <= bucket <= capacity
    assert not any(slots <= size < bucket for size in bucket_sizes(capacity))


def test_more_than_the_capacity_is_refused() -> None:
    with pytest.raises(HearthError) as caught:
        bucket_for(513, (256, 512))
    assert caught.value.code == "capacity_exceeded"
