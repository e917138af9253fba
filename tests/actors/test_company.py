import pytest

from actors.company import Company

WAIT, HOLD = 0.005, 2.0


def live(company: Company, windows: int, *, rows: int = 1, seconds: float = 0.5) -> None:
    """So many batches that begin with `rows` rows, and nobody comes after."""
    for number in range(windows):
        company.started(float(number), rows)
        company.ended(seconds)


def test_company_is_expected_at_first() -> None:
    assert Company(WAIT, HOLD).wait_s == WAIT


def test_who_is_always_alone_waits_no_longer() -> None:
    company = Company(WAIT, HOLD)
    live(company, 100)
    assert company.wait_s == WAIT
    live(company, 100)
    assert company.wait_s == 0


def test_batches_of_several_rows_are_company() -> None:
    company = Company(WAIT, HOLD)
    live(company, 1000, rows=2)
    assert company.wait_s == WAIT


@pytest.mark.parametrize(("late_s", "waits"), [(0.004, WAIT), (0.006, 0)])
def test_company_counts_also_when_nobody_waited_for_it(late_s: float, waits: float) -> None:
    company = Company(WAIT, HOLD)
    live(company, 300)
    assert company.wait_s == 0
    for number in range(3):
        opened = 1000.0 + number
        company.started(opened, 1)
        company.arrived(opened + late_s)
        company.ended(0.5)
    assert company.wait_s == waits


def test_a_window_counts_once_however_many_come() -> None:
    crowd, pair = Company(WAIT, HOLD), Company(WAIT, HOLD)
    for company, many in ((crowd, 9), (pair, 1)):
        live(company, 300)
        company.started(1000.0, 1)
        for _ in range(many):
            company.arrived(1000.001)
    assert crowd._share == pair._share


def test_the_shorter_the_batches_the_less_there_is_to_miss() -> None:
    short, long = Company(WAIT, HOLD), Company(WAIT, HOLD)
    live(short, 150, seconds=0.05)
    live(long, 150, seconds=1.0)
    assert (short.wait_s, long.wait_s) == (0, WAIT)


def test_a_batch_that_is_held_up_costs_others_no_more_than_the_limit() -> None:
    company = Company(WAIT, HOLD)
    live(company, 10, seconds=1000.0)
    assert company._batch_s == HOLD


def test_without_a_wait_there_is_none() -> None:
    assert Company(0.0, HOLD).wait_s == 0
