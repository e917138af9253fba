import pytest

from hearth.runtime.ewma import Ewma


def test_the_first_number_is_taken_whole_and_later_ones_by_their_share() -> None:
    mean = Ewma(0.1)
    assert mean.value == 0
    mean.add(10)
    assert mean.value == 10
    mean.add(20)
    assert mean.value == pytest.approx(11)


def test_a_start_counts_as_what_was_before_the_first_number() -> None:
    mean = Ewma(1 / 4, 1.0)
    mean.add(0)
    assert mean.value == 0.75


def test_two_from_0_on_have_the_quotient_of_what_is_weighed() -> None:
    seconds, tokens = Ewma(0.1, 0.0), Ewma(0.1, 0.0)
    for count in (100, 1, 40):
        seconds.add(count * 0.002)
        tokens.add(count)
    assert seconds.value / tokens.value == pytest.approx(0.002)
