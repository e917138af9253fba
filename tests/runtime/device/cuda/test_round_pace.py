import pytest

from hearth.runtime.device.cuda.walks import RoundPace


def test_nothing_is_expected_at_first() -> None:
    assert not RoundPace().expected


def test_the_shorter_of_two_rounds_is_expected() -> None:
    pace = RoundPace()
    found = []
    for took in (0.002, 0.003, 0.0025, 0.004):
        pace.record(took, ahead=True)
        found.append(pace.expected)
    assert found == [0.002, 0.002, 0.0025, 0.0025]


def test_one_slow_round_makes_no_other_late() -> None:
    """Rounds of 2 ms with one of 400: a wait ends late by what is expected too long."""
    pace, lost = RoundPace(), 0.0
    for real in (0.002, 0.002, 0.4, *[0.002] * 10):
        took = max(real, pace.expected)
        lost += took - real
        pace.record(took, ahead=pace.expected <= real)
    assert lost == pytest.approx(0)


def test_a_round_that_was_over_already_leaves_nothing_to_expect() -> None:
    pace = RoundPace()
    pace.record(0.002, ahead=True)
    pace.record(0.002, ahead=False)
    assert not pace.expected
    pace.record(0.001, ahead=True)
    assert pace.expected == 0.001
