from __future__ import annotations

from actors.executor_batch import ExecutorBatch
from actors.messages import Continuation, RequestRound
from runtime.decoding.batch_runtime import StepResult
from runtime.request import RowRound, RowToken


def prefill(*tokens: RowToken, started: float = 0.0, ended: float = 1.0) -> StepResult:
    return StepResult("prefill", list(tokens), started, ended)


def decode(*tokens: RowToken, started: float = 1.0, ended: float = 1.1) -> StepResult:
    return StepResult("decode", list(tokens), started, ended)


def test_tokens_are_told_under_their_requests() -> None:
    batch = ExecutorBatch(1, [30, 10, 20])
    assert batch.record(prefill(started=5.0, ended=6.0)) is None
    first = batch.record(prefill(RowToken(2, 8), RowToken(0, 9), started=6.0, ended=6.5))
    assert first is not None
    assert (first.rids, first.prefill_s, first.ended) == ([20, 30], 1.5, 6.5)
    second = batch.record(decode(RowToken(1, 4)))
    assert second is not None
    assert (second.rids, second.prefill_s) == ([10], None)


def test_rows_that_end_or_fail_are_live_no_more() -> None:
    batch = ExecutorBatch(1, [1, 2, 3])
    batch.record(decode(RowToken(0, 5, finish="stop"), RowToken(2, -1, error="non_finite")))
    assert batch.live == [2]
    assert batch.drop(1) is None
    assert batch.drop(2) == 1
    assert batch.live == []


def test_only_live_rows_are_put_back() -> None:
    batch = ExecutorBatch(1, [1, 2])
    batch.drop(1)
    assert batch.continuations({0: [4], 1: [5, 6]}.get) == [Continuation(2, [5, 6])]
    assert batch.continuations(lambda _: None) == []


def test_a_batch_pays_for_its_prefill() -> None:
    batch = ExecutorBatch(1, [1])
    assert not batch.has_paid
    batch.record(prefill(started=0.0, ended=0.15))
    for step in range(2):
        assert not batch.has_paid, step
        batch.record(decode(started=1.0, ended=1.1))
    assert batch.has_paid


def verify(*tokens: RowToken, rounds: list[RowRound]) -> StepResult:
    return StepResult("verify", list(tokens), 1.0, 1.2, rounds)


def test_a_round_gives_a_row_several_tokens_and_ends_it_with_the_last() -> None:
    batch = ExecutorBatch(1, [30, 10])
    told = batch.record(
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
    assert told.prefill_s is None
    assert batch.live == [30]


def test_rounds_pay_for_the_prefill_as_decode_steps_do() -> None:
    batch = ExecutorBatch(1, [1])
    batch.record(prefill(started=0.0, ended=0.15))
    batch.record(verify(RowToken(0, 5), rounds=[RowRound(0, 4, 1)]))
    assert batch.has_paid
