from hypothesis import given
from hypothesis import strategies as st

from runtime.executor.simulated_engine import simulated_config
from runtime.request import RequestOptions, RowRequest, RowToken
from runtime.rows import DecodingInferenceContext, DecodingRow, RowState
from runtime.sampling import Sample

CONFIG = simulated_config(vocab_size=50, eos_token_ids=(0, 7))


def _request(tokens: int = 3, max_tokens: int = 5, *, ignore_eos: bool = False) -> RowRequest:
    return RowRequest(
        token_ids=[1] * tokens,
        prompt_length=tokens,
        options=RequestOptions(max_tokens=max_tokens, ignore_eos=ignore_eos),
    )


def _taken(row: DecodingRow, token_id: int) -> RowToken:
    report = row.take(Sample(token_id))
    assert report is not None
    return report


def _context(*lengths: int) -> DecodingInferenceContext:
    return DecodingInferenceContext([_request(length) for length in lengths], CONFIG)


def test_rows_begin_longest_first_and_equal_ones_in_order() -> None:
    assert [row.index for row in _context(2, 5, 2, 9).rows] == [3, 1, 0, 2]


def test_rows_with_prompt_left_are_the_first_ones() -> None:
    context = _context(2, 5, 9)
    for row in context.rows:
        row.filled = min(len(row.token_ids), 4)
    assert [row.index for row in context.prefilling] == [2, 1]
    assert [row.prompt_left for row in context.rows] == [5, 1, 0]
    assert context.has_prompt_left


def test_a_token_is_taken() -> None:
    row = DecodingRow(4, _request(), CONFIG)
    assert row.take(Sample(9, -0.5)) == RowToken(4, 9, -0.5)
    assert (row.token_ids, row.generated, row.state) == ([1, 1, 1, 9], [9], RowState.LIVE)


def test_every_end_token_stops_a_row() -> None:
    for end in (0, 7):
        row = DecodingRow(0, _request(), CONFIG)
        assert _taken(row, end).finish == "stop"
        assert row.state is RowState.FINISHED
        assert row.generated == [end]


def test_an_end_token_on_the_last_place_is_a_stop() -> None:
    assert _taken(DecodingRow(0, _request(max_tokens=1), CONFIG), 7).finish == "stop"


def test_end_tokens_can_be_ignored() -> None:
    row = DecodingRow(0, _request(max_tokens=2, ignore_eos=True), CONFIG)
    assert [_taken(row, token).finish for token in (0, 7)] == [None, "length"]


def test_max_tokens_counts_what_was_generated_before() -> None:
    request = RowRequest(
        token_ids=[1, 2, 3, 4], prompt_length=2, options=RequestOptions(max_tokens=3)
    )
    row = DecodingRow(0, request, CONFIG)
    assert _taken(row, 9).finish == "length"
    assert row.generated == [3, 4, 9]


def test_a_row_without_finite_logits_fails() -> None:
    row = DecodingRow(2, _request(), CONFIG)
    assert row.take(None) == RowToken(2, -1, error="non_finite")
    assert (row.state, row.generated) == (RowState.FAILED, [])


def test_the_callers_request_is_left_alone() -> None:
    request = _request()
    DecodingRow(0, request, CONFIG).take(Sample(9))
    assert request.token_ids == [1, 1, 1]


def test_only_live_rows_can_be_cancelled() -> None:
    context = _context(3, 3, 3)
    context.rows[1].state = RowState.FINISHED
    for index in (0, 1, 99):
        context.leave(index)
    states = [row.state for row in context.rows]
    assert states == [RowState.CANCELLED, RowState.FINISHED, RowState.LIVE]
    assert [row.index for row in context.live_rows] == [2]


@given(st.lists(st.sampled_from(list(RowState)), min_size=1, max_size=8))
def test_eviction_keeps_live_rows_in_order(states: list[RowState]) -> None:
    context = _context(*range(9, 9 - len(states), -1))
    for row, state in zip(context.rows, states, strict=True):
        row.state = state
    before = [row.index for row in context.rows]
    assert context.all_run_on == (set(states) == {RowState.LIVE})
    assert context.any_live == (RowState.LIVE in states)
    mapping = context.evict()
    kept = [index for index, target in zip(before, mapping, strict=True) if target >= 0]
    assert [row.index for row in context.rows] == kept
    assert [target >= 0 for target in mapping] == [one is RowState.LIVE for one in states]
    assert [target for target in mapping if target >= 0] == list(range(len(kept)))


def test_a_row_whose_last_token_is_awaited_leaves_and_is_still_live() -> None:
    context = _context(3, 3)
    first, second = context.rows
    first.unplanned = 0
    assert (first.runs_on, second.runs_on) == (False, True)
    assert context.evict() == [-1, 0]
    assert context.live_rows == [first, second]
    for token in (9, 9, 9, 9):
        assert _taken(first, token).finish is None
    assert _taken(first, 9).finish == "length"
    assert context.live_rows == [second]


def test_a_token_that_comes_too_late_is_dropped() -> None:
    context = _context(3)
    (row,) = context.rows
    context.leave(0)
    assert row.take(Sample(9)) is None
    assert row.take(None) is None
    assert row.generated == []


def test_a_row_that_was_only_checked_has_nothing_to_report() -> None:
    row = DecodingRow(0, _request(), CONFIG)
    assert row.take(Sample(-1)) is None
    assert row.token_ids == [1, 1, 1]


def test_a_lost_batch_has_no_live_rows() -> None:
    context = _context(3, 4)
    context.fail_all()
    assert context.live_rows == []
