from tests.gpu.near_ties import Divergence, Reference, divergences

WANTED = [Reference([1, 2, 3], [5.0, 0.01, 4.0])]


def test_equal_rows_do_not_part() -> None:
    assert divergences([[1, 2, 3]], WANTED) == []


def test_the_first_difference_counts_with_the_lead_that_was_lost() -> None:
    assert divergences([[1, 9, 9]], WANTED) == [Divergence(0, 1, 0.01)]


def test_a_row_that_ends_early_or_late_parts_for_good() -> None:
    assert divergences([[1, 2]], WANTED) == [Divergence(0, 2, float("inf"))]
    assert divergences([[1, 2, 3, 4]], WANTED) == [Divergence(0, 3, float("inf"))]
