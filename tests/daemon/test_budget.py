import pytest

from daemon.budget import Budget, budget_of
from runtime.errors import HearthError
from runtime.executor.simulated_engine import simulated_config


def test_the_parts_add_up() -> None:
    assert Budget({"weights": 3, "cache": 4}, 10).needed == 7


def test_what_fits_exactly_fits() -> None:
    Budget({"weights": 10}, 10).check()


def test_what_does_not_fit_is_refused_with_both_figures() -> None:
    with pytest.raises(HearthError, match="needs 12 MiB and 10 MiB are free") as caught:
        Budget({"weights": 12 << 20}, 10 << 20).check()
    assert caught.value.code == "out_of_memory"


def test_a_larger_cache_needs_more() -> None:
    small = budget_of(simulated_config(capacity=256))
    large = budget_of(simulated_config(capacity=4096))
    assert small.needed < large.needed
    assert small.available > 0
