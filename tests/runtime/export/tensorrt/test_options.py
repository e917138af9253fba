import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.export.tensorrt.options import (
    Feature,
    PlanOptions,
    check_plan_options,
    has_feature,
    resolve_decode_batches,
)


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))],
)
def test_decode_batches_are_powers_of_two_and_the_largest(
    largest: int, sizes: tuple[int, ...]
) -> None:
    assert resolve_decode_batches(PlanOptions(), largest) == sizes


def test_chosen_decode_batches_are_taken() -> None:
    options = PlanOptions(decode_batches=(1, 8))
    check_plan_options(options, 8)
    assert resolve_decode_batches(options, 8) == (1, 8)


@pytest.mark.parametrize("sizes", [(1, 4), (8, 1), (0, 8), (1, 1, 8), (16,)])
def test_decode_batches_must_rise_to_the_largest(sizes: tuple[int, ...]) -> None:
    with pytest.raises(HearthError, match="largest batch, 8"):
        check_plan_options(PlanOptions(decode_batches=sizes), 8)


def test_numbers_without_meaning_are_refused() -> None:
    for options in (
        PlanOptions(optimization_level=6),
        PlanOptions(workspace_bytes=-1),
        PlanOptions(kv_cache_dtype="float16"),  # type: ignore[arg-type] # as a caller may
    ):
        with pytest.raises(HearthError):
            check_plan_options(options, 8)


FEATURES: tuple[Feature, ...] = ("native dialect", "bfloat16", "drafts")


@pytest.mark.parametrize(
    ("version", "can"),
    [
        ("8.6.1", (False, False, False)),
        ("9.3.0", (False, True, False)),
        ("10.14.1", (False, True, True)),
        ("10.15.1.2", (True, True, True)),
    ],
)
def test_what_a_version_can_do(version: str, can: tuple[bool, bool, bool]) -> None:
    assert tuple(has_feature(one, "tensorrt", version) for one in FEATURES) == can


def test_rtx_numbers_its_versions_otherwise() -> None:
    assert all(has_feature(one, "tensorrt_rtx", "1.7.1") for one in FEATURES)
