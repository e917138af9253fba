from msgspec import structs

from hearth.runtime.batch import (
    PATIENCE,
    BatchReorder,
    DecodingInferenceContext,
    DecodingRow,
    DirtySlots,
    RowMove,
    RowState,
)
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.request import RequestOptions, RowRequest, RowToken
from hearth.runtime.sampling import Sample

PLACES, SLOTS = 4, 64
CONFIG = simulated_config(
    vocab_size=50, eos_token_ids=(0, 7), max_batch=PLACES, capacity=SLOTS, prefill_chunk=16
)


def _request(tokens: int = 3, max_tokens: int = 5, *, ignore_eos: bool = False) -> RowRequest:
    return RowRequest(
        token_ids=[1] * tokens,
        prompt_length=tokens,
        options=RequestOptions(max_tokens=max_tokens, ignore_eos=ignore_eos),
    )


def _row(number: int = 0, request: RowRequest | None = None) -> DecodingRow:
    return DecodingRow(number, request or _request(), SLOTS, frozenset({0, 7}))


def _taken(row: DecodingRow, token_id: int) -> RowToken:
    report = row.take(Sample(token_id))
    assert report is not None
    return report


def _context(*lengths: int, room: int = 1) -> DecodingInferenceContext:
    """Rows of these prompts, in their places."""
    context = DecodingInferenceContext(CONFIG, room)
    context.admit([_request(length) for length in lengths])
    context.arrange()
    return context


def _decoding(*lengths: int, room: int = 1) -> DecodingInferenceContext:
    """Rows of these prompts, the shortest first, that have all been prefilled."""
    context = _context(*lengths, room=room)
    context.prefilled(lengths)
    return context


def _numbers(context: DecodingInferenceContext) -> list[int]:
    return [row.number for row in context.rows]


def test_new_rows_are_seated_by_prompt_and_equal_ones_in_order() -> None:
    context = DecodingInferenceContext(CONFIG)
    requests = [_request(length) for length in (5, 2, 9, 2)]
    assert context.admit(requests) == [0, 1, 2, 3]
    reorder = context.arrange()
    assert reorder is not None
    assert [(assignment.place, assignment.request) for assignment in reorder.assignments] == [
        (place, requests[number]) for place, number in enumerate((1, 3, 0, 2))
    ]
    assert (reorder.rows, reorder.moves, reorder.stale) == (4, [], [])
    assert (_numbers(context), context.decoding) == ([1, 3, 0, 2], 0)
    assert context.arrange() is None


def test_rows_whose_prompt_ends_decode_where_they_are() -> None:
    context = _context(2, 4, 9)
    assert context.prefilled([2, 4, 4]) == 2
    assert context.decoding == 2
    assert [row.prompt_left for row in context.rows] == [0, 0, 5]
    assert [row.remaining_budget for row in context.rows] == [4, 4, 5]
    context.decoded()
    assert [row.filled for row in context.rows] == [3, 5, 4]
    assert context.prefilled([5]) == 1
    assert context.arrange() is None


def test_the_last_decoding_row_fills_a_gap_and_joiners_close_up() -> None:
    context = _context(2, 3, 4, 30)
    context.prefilled([2, 3, 4])
    context.leave(0)
    # A decode step that ran padded may have written behind the joiner.
    moves, stale = [RowMove(2, 0, 4), RowMove(3, 2, 0)], [DirtySlots(3, 0, 1)]
    assert context.arrange() == BatchReorder(3, moves, [], stale)
    assert (_numbers(context), context.decoding) == ([2, 1, 3], 2)


def test_a_short_newcomer_is_seated_before_a_joiner() -> None:
    context = _decoding(2)
    context.admit([_request(30)])
    context.arrange()
    context.prefilled([16])
    context.admit([_request(4), _request(14)])
    found = context.arrange()
    assert found is not None
    assert found.moves == [RowMove(1, 2, 16)]
    assert [assignment.place for assignment in found.assignments] == [1, 3]
    # Of equal rests that of the earlier row comes first.
    assert _numbers(context) == [0, 2, 1, 3]


def test_joiners_that_move_up_go_before_those_below_them() -> None:
    context = _context(20, 30)
    context.admit([_request(4), _request(5)])
    found = context.arrange()
    assert found is not None
    assert found.moves == [RowMove(1, 3, 0), RowMove(0, 2, 0)]


def test_what_nobody_has_seen_is_stale_where_a_row_leaves_it() -> None:
    context = _decoding(2, 10)
    first, second = context.rows
    context.decoded()
    context.leave(0)
    # The row that moves in fills what the other leaves; what it leaves itself was not seen.
    found = context.arrange([(first, 1), (second, 1)])
    assert found == BatchReorder(1, [RowMove(1, 0, 11)], [], [DirtySlots(1, 10, 11)])


def test_a_short_row_does_not_cover_what_a_long_one_leaves() -> None:
    context = _decoding(2, 10, room=5)
    first, second = context.rows
    context.decoded()
    context.rows.reverse()
    context.leave(1)
    found = context.arrange([(second, 1), (first, 1), (second, 2)])
    assert found == BatchReorder(
        1, [RowMove(1, 0, 3)], [], [DirtySlots(0, 8, 16), DirtySlots(1, 2, 8)]
    )


def test_a_joiner_leaves_what_a_padded_step_wrote_behind_it() -> None:
    context = _context(30)
    context.prefilled([8])
    context.leave(0)
    assert context.arrange() == BatchReorder(0, [], [], [DirtySlots(0, 8, 9)])


def test_the_padding_of_a_chunk_that_nobody_has_seen_is_stale() -> None:
    context = _context(6, 20)
    context.prefilled([2, 8])
    first, second = context.rows
    context.leave(0)
    # The chunk had eight tokens a row: of the first row two, and six of padding.
    found = context.arrange([(first, 2), (second, 8)], padding=6)
    assert found == BatchReorder(1, [RowMove(1, 0, 8)], [], [DirtySlots(1, 0, 14)])
    context = _context(6)
    context.prefilled([2])
    (first,) = context.rows
    context.leave(0)
    assert context.arrange([(first, 2)], padding=6) == BatchReorder(
        0, [], [], [DirtySlots(0, 0, 8)]
    )


def test_the_place_of_a_failed_row_is_stale_as_a_whole() -> None:
    context = _decoding(2, 10)
    context.rows[0].take(None)
    context.admit([_request(3)])
    found = context.arrange()
    assert found is not None
    assert found.stale == [DirtySlots(0, 10, SLOTS)]
    assert [assignment.place for assignment in found.assignments] == [1]


def test_every_place_is_stale_when_all_is_lost() -> None:
    context = _decoding(2, 10)
    context.fail_all()
    assert not context.any_live
    assert context.admit([_request(3)]) == [0]
    found = context.arrange()
    assert found is not None
    assert found.stale == [DirtySlots(place, 0, SLOTS) for place in range(PLACES)]
    assert context.arrange() is None


def test_numbers_count_on_while_a_row_is_live() -> None:
    context = _decoding(2, 3)
    assert context.admit([_request()]) == [2]
    context.leave(0)
    assert context.admit([_request()]) == [3]
    for number in (1, 2, 3, 3, 99):
        context.leave(number)
    assert context.admit([_request()]) == [0]
    context.arrange()
    assert _numbers(context) == [0]


def test_a_row_that_leaves_before_it_is_seated_takes_no_place() -> None:
    context = DecodingInferenceContext(CONFIG)
    context.admit([_request(), _request(4)])
    assert context.free == PLACES - 2
    context.leave(0)
    assert context.free == PLACES - 1
    found = context.arrange()
    assert found is not None
    assert (found.rows, _numbers(context)) == (1, [1])


def test_the_house_is_closed_while_newcomers_pass_a_joiner() -> None:
    context = _context(60)
    for number in range(1, PATIENCE + 1):
        assert context.free == PLACES - 1
        context.admit([_request(2)])
        context.arrange()
        context.prefilled([2])
        context.leave(number)
    assert (context.free, context.places) == (0, PLACES - 1)
    context.arrange()
    context.prefilled([16])
    assert context.free == PLACES - 1


def test_an_earlier_row_passes_nobody() -> None:
    context = _context(10, 60, 60)
    for _ in range(2 * PATIENCE):
        context.prefilled([1])
    assert context.free == 1


def test_room_for_trees_is_taken_from_what_a_row_may_hold() -> None:
    context = DecodingInferenceContext(CONFIG, 5)
    assert context.capacity == SLOTS - 4
    context.admit([structs.replace(_request(), options=RequestOptions())])
    context.arrange()
    (row,) = context.rows
    assert row.remaining_budget == SLOTS - 4 - 3


def test_a_token_is_taken() -> None:
    row = _row(4)
    assert row.take(Sample(9, -0.5)) == RowToken(4, 9, -0.5)
    assert (row.token_ids, row.generated, row.state) == ([1, 1, 1, 9], [9], RowState.LIVE)


def test_every_end_token_stops_a_row() -> None:
    for end in (0, 7):
        row = _row()
        assert _taken(row, end).finish == "stop"
        assert row.state is RowState.FINISHED
        assert row.generated == [end]


def test_an_end_token_on_the_last_place_is_a_stop() -> None:
    assert _taken(_row(0, _request(max_tokens=1)), 7).finish == "stop"


def test_end_tokens_can_be_ignored() -> None:
    row = _row(0, _request(max_tokens=2, ignore_eos=True))
    assert [_taken(row, token).finish for token in (0, 7)] == [None, "length"]


def test_max_tokens_counts_what_was_generated_before() -> None:
    request = RowRequest(
        token_ids=[1, 2, 3, 4], prompt_length=2, options=RequestOptions(max_tokens=3)
    )
    row = _row(0, request)
    assert _taken(row, 9).finish == "length"
    assert row.generated == [3, 4, 9]


def test_a_row_without_finite_logits_fails() -> None:
    row = _row(2)
    assert row.take(None) == RowToken(2, -1, error="non_finite")
    assert (row.state, row.generated) == (RowState.FAILED, [])


def test_the_callers_request_is_left_alone() -> None:
    request = _request()
    _row(0, request).take(Sample(9))
    assert request.token_ids == [1, 1, 1]


def test_only_live_rows_can_leave() -> None:
    context = _decoding(3, 3, 3)
    context.rows[1].state = RowState.FINISHED
    for number in (0, 1, 99):
        context.leave(number)
    states = [row.state for row in context.rows]
    assert states == [RowState.CANCELLED, RowState.FINISHED, RowState.LIVE]


def test_a_row_whose_last_token_is_awaited_leaves_and_is_still_live() -> None:
    context = _decoding(3, 3)
    first, second = context.rows
    first.remaining_budget = 0
    assert context.free == PLACES - 1
    assert context.arrange() == BatchReorder(1, [RowMove(1, 0, 3)], [], [])
    assert context.rows == [second]
    context.leave(1)
    assert context.any_live
    assert context.release(0) is None
    for token in (9, 9, 9, 9):
        assert _taken(first, token).finish is None
    assert _taken(first, 9).finish == "length"
    assert not context.any_live


def test_a_token_that_comes_too_late_is_dropped() -> None:
    context = _decoding(3)
    (row,) = context.rows
    context.leave(0)
    assert row.take(Sample(9)) is None
    assert row.take(None) is None
    assert row.generated == []


def test_a_row_that_was_only_checked_has_nothing_to_report() -> None:
    row = _row()
    assert row.take(Sample(-1)) is None
    assert row.token_ids == [1, 1, 1]


def test_a_row_that_would_go_on_is_released_with_its_tokens() -> None:
    context = _decoding(3, 3)
    context.rows[1].take(Sample(9))
    assert [context.release(number) for number in (1, 1, 99)] == [[9], None, None]
    assert _numbers(context) == [0, 1]
    context.arrange()
    assert _numbers(context) == [0]
