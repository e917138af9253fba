import pytest

from hearth.runtime.request import RowRound
from hearth.runtime.speculation.policy import EagleGenerationMetrics


def test_rounds_add_up_over_rows_and_steps() -> None:
    metrics = EagleGenerationMetrics()
    metrics.record(
        [RowRound(0, 5, 3), RowRound(2, 4, 1)], draft_s=0.25, verify_s=0.5, commit_s=0.125
    )
    metrics.record([RowRound(0, 5, 2)], draft_s=0.25, verify_s=0.5, commit_s=0.125)
    assert (metrics.steps, metrics.rounds, metrics.drafted, metrics.accepted) == (2, 3, 14, 6)
    assert (metrics.draft_s, metrics.verify_s, metrics.commit_s) == (0.5, 1.0, 0.25)
    assert metrics.accept_length == 2.0


def test_positions_tell_how_far_rounds_came() -> None:
    metrics = EagleGenerationMetrics()
    rows = [RowRound(0, 9, 1), RowRound(1, 9, 4), RowRound(2, 9, 2), RowRound(3, 9, 1)]
    metrics.record(rows, draft_s=0.0, verify_s=0.0, commit_s=0.0)
    assert metrics.accepted_by_position == [4, 2, 1, 1]
    assert sum(metrics.accepted_by_position) == metrics.accepted
    assert metrics.accept_rates == pytest.approx([1.0, 0.5, 0.25, 0.25])


def test_a_step_without_speculating_rows_costs_time_and_gives_no_round() -> None:
    metrics = EagleGenerationMetrics()
    metrics.record([], draft_s=0.0, verify_s=1.0, commit_s=0.0)
    assert (metrics.steps, metrics.rounds, metrics.verify_s) == (1, 0, 1.0)


def test_nothing_done_has_no_length() -> None:
    metrics = EagleGenerationMetrics()
    assert metrics.accept_length == 0.0
    assert metrics.accept_rates == []
    # What happened between two readings, if nothing did.
    assert EagleGenerationMetrics(accepted_by_position=[0, 0]).accept_rates == []


def test_two_metrics_share_nothing() -> None:
    first, second = EagleGenerationMetrics(), EagleGenerationMetrics()
    first.record([RowRound(0, 1, 2)], draft_s=0.0, verify_s=0.0, commit_s=0.0)
    assert second.accepted_by_position == []
