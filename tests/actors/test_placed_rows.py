from __future__ import annotations

from hearth.actors.messages import RequestRound
from hearth.actors.placed_rows import PlacedRows
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.request import RowRound, RowToken


def prefill(*tokens: RowToken, started: float = 0.0, ended: float = 1.0) -> StepResult:
    return StepResult("prefill", list(tokens), started, ended)


def decode(*tokens: RowToken, started: float = 1.0, ended: float = 1.1) -> StepResult:
    return StepResult("decode", list(tokens), started, ended)


def placed(*rids: int) -> PlacedRows:
    rows = PlacedRows(3)
    rows.place(rids, range(len(rids)), 0.5)
    return rows


def test_tokens_are_told_under_their_requests_first_ones_with_the_time_of_their_place() -> None:
    rows = placed(30, 10, 20)
    assert rows.record(prefill(started=5.0, ended=6.0)) is None
    first = rows.record(prefill(RowToken(2, 8), RowToken(0, 9), started=6.0, ended=6.5))
    assert first is not None
    assert (first.incarnation, first.rids, first.ended) == (3, [20, 30], 6.5)
    assert first.placed == {20: 0.5, 30: 0.5}
    second = rows.record(decode(RowToken(2, 4)))
    assert second is not None
    assert (second.rids, second.placed) == ([20], {})


def test_what_came_from_the_prefix_cache_is_told_under_the_request() -> None:
    rows = placed(30, 10)
    result = prefill(RowToken(0, 8), RowToken(1, 9))
    result.cached = {1: 64}
    told = rows.record(result)
    assert told is not None
    assert told.cached == {10: 64}


def test_rows_that_end_or_fail_go_on_no_more() -> None:
    rows = placed(1, 2, 3)
    rows.record(decode(RowToken(0, 5, finish="stop"), RowToken(2, -1, error="non_finite")))
    assert list(rows) == [2]
    assert (rows.number(1), rows.remove(1)) == (None, None)
    assert (rows.number(2), rows.remove(2)) == (1, 1)
    assert not len(rows)


def test_numbers_begin_again_for_rows_that_come_later() -> None:
    rows = placed(1)
    rows.record(decode(RowToken(0, 5, finish="stop")))
    rows.place([7], [0], 2.0)
    told = rows.record(prefill(RowToken(0, 6), started=2.0, ended=2.5))
    assert told is not None
    assert (told.rids, told.placed) == ([7], {7: 2.0})


def test_each_row_pays_for_the_prefill_of_its_own_time() -> None:
    rows = placed(1)
    assert not rows.has_paid(1)
    rows.record(prefill(RowToken(0, 5), started=0.0, ended=0.15))
    rows.record(decode(RowToken(0, 5), started=1.0, ended=1.1))
    rows.place([2], [1], 1.1)
    assert not rows.has_paid(1)
    rows.record(prefill(RowToken(1, 5), started=1.1, ended=1.15))
    rows.record(decode(RowToken(0, 5), RowToken(1, 5), started=1.15, ended=1.25))
    assert rows.has_paid(1)
    assert rows.has_paid(2)
    rows.place([3], [2], 1.25)
    rows.record(prefill(started=1.25, ended=1.26))
    assert not rows.has_paid(3)


def test_a_prefill_that_fails_takes_its_own_rows_along_and_no_other() -> None:
    rows = placed(1, 2, 3)
    result = prefill(
        RowToken(0, 7), RowToken(1, -1, error="out_of_memory"), RowToken(2, -1, error="non_finite")
    )
    assert rows.take_failed(result) == []
    result.failure = HearthError("out_of_memory", "no room")
    assert rows.take_failed(result) == [2]
    told = rows.record(result)
    assert told is not None
    assert told.rids == [1, 3]
    assert list(rows) == [1]


def verify(*tokens: RowToken, rounds: list[RowRound]) -> StepResult:
    return StepResult("verify", list(tokens), 1.0, 1.2, rounds)


def test_a_round_gives_a_row_several_tokens_and_ends_it_with_the_last() -> None:
    rows = placed(30, 10)
    told = rows.record(
        verify(
            RowToken(1, 4),
            RowToken(1, 5),
            RowToken(0, 6),
            RowToken(1, 7, finish="stop"),
            rounds=[RowRound(1, 8, 3), RowRound(0, 5, 1)],
        )
    )
    assert told is not None
    assert told.rids == [10, 10, 30, 10]
    assert [token.token_id for token in told.tokens] == [4, 5, 6, 7]
    assert told.rounds == [RequestRound(10, 8, 3), RequestRound(30, 5, 1)]
    assert told.placed == {}
    assert list(rows) == [30]


def test_rounds_pay_for_the_prefill_as_decode_steps_do() -> None:
    rows = placed(1)
    rows.record(prefill(RowToken(0, 5), started=0.0, ended=0.15))
    rows.record(verify(RowToken(0, 5), rounds=[RowRound(0, 4, 1)]))
    assert rows.has_paid(1)
