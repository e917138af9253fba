"""Rows of a batch, and random lives of them against a model of the slots of each place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.request import NO_ROW, RequestOptions, RowRequest, RowToken
from tests.runtime.arrangements import REQUEST, arrangements, new_row

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
    report = row.take(RowToken(NO_ROW, token_id))
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
    assert [row.number for row in context.admit(requests)] == [0, 1, 2, 3]
    reorder = context.arrange()
    assert reorder is not None
    assert [(place, row.request) for place, row in reorder.assignments] == [
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
    assert [place for place, _ in found.assignments] == [1, 3]
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
    assert [place for place, _ in found.assignments] == [1]


def test_every_place_is_stale_when_all_is_lost() -> None:
    context = _decoding(2, 10)
    context.fail_all()
    assert not context.any_live
    assert [row.number for row in context.admit([_request(3)])] == [0]
    found = context.arrange()
    assert found is not None
    assert found.stale == [DirtySlots(place, 0, SLOTS) for place in range(PLACES)]
    assert context.arrange() is None


def test_numbers_count_on_while_a_row_is_live() -> None:
    context = _decoding(2, 3)
    assert [row.number for row in context.admit([_request()])] == [2]
    context.leave(0)
    assert [row.number for row in context.admit([_request()])] == [3]
    for number in (1, 2, 3, 3, 99):
        context.leave(number)
    assert [row.number for row in context.admit([_request()])] == [0]
    context.arrange()
    assert _numbers(context) == [0]


def test_rows_have_the_numbers_that_the_caller_gives() -> None:
    context = DecodingInferenceContext(CONFIG)
    context.admit([_request(), _request(4)], [70, 12])
    context.arrange()
    assert _numbers(context) == [70, 12]
    context.leave(12)
    context.leave(1)
    assert [row.state for row in context.rows] == [RowState.LIVE, RowState.CANCELLED]
    # One that was put back comes again under its number.
    context.arrange()
    context.admit([_request(4)], [12])
    context.arrange()
    assert _numbers(context) == [70, 12]
    assert context.release(12) == []


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
    # Later is who was admitted later, whatever its number.
    for number in range(-1, -1 - PATIENCE, -1):
        assert context.free == PLACES - 1
        context.admit([_request(2)], [number])
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
    assert row.take(RowToken(NO_ROW, 9, -0.5)) == RowToken(4, 9, -0.5)
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
    _row(0, request).take(RowToken(NO_ROW, 9))
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
    assert row.take(RowToken(NO_ROW, 9)) is None
    assert row.take(None) is None
    assert row.generated == []


def test_a_row_that_was_only_checked_has_nothing_to_report() -> None:
    row = _row()
    assert row.take(RowToken(NO_ROW, -1)) is None
    assert row.token_ids == [1, 1, 1]


def test_a_row_that_would_go_on_is_released_with_its_tokens() -> None:
    context = _decoding(3, 3)
    context.rows[1].take(RowToken(NO_ROW, 9))
    # It has not had its first token reported: it never pays.
    assert context.release(1, 1e9) is None
    context.rows[1].paid_from = 2.5
    assert context.release(1, 2.0) is None
    assert context.release(1, 2.5) == [9]
    assert [context.release(number) for number in (1, 99)] == [None, None]
    assert _numbers(context) == [0, 1]
    context.arrange()
    assert _numbers(context) == [0]


ARRANGED = 6


@given(st.data())
def test_rows_that_move_one_by_one_settle_where_the_moves_say(data: st.DataObject) -> None:
    kept = list(range(10, 10 + data.draw(st.integers(0, ARRANGED))))
    reorder = data.draw(arrangements(kept, ARRANGED))
    board: list[int | None] = [*kept, *[None] * (ARRANGED - len(kept))]
    for source, target, _ in reorder.moves:
        board[target] = board[source]
    for place, *_ in reorder.assignments:
        board[place] = 0
    assert reorder.settle(kept, lambda _: 0) == board[: reorder.rows]


def test_a_fresh_house_seats_its_rows_in_order() -> None:
    fresh = BatchReorder.fresh([REQUEST, REQUEST])
    assert (fresh.rows, [place for place, _ in fresh.assignments]) == (2, [0, 1])
    assert [row.request for _, row in fresh.assignments] == [REQUEST, REQUEST]
    assert fresh.settle([7, 8, 9], lambda _: 0) == [0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        BatchReorder(2, [RowMove(1, 0, 3), RowMove(0, 1, 3)]),
        BatchReorder(2, [RowMove(0, 1, 3), RowMove(2, 1, 3)]),
        BatchReorder(2, [RowMove(5, 1, 3)]),
        BatchReorder(2, [RowMove(0, 1, 3)]),
        BatchReorder(2, [RowMove(2, 4, 3)]),
        BatchReorder(4),
        BatchReorder(2, [RowMove(2, 1, 3)], [new_row(1)]),
        BatchReorder(2, assignments=[new_row(1), new_row(1)]),
        BatchReorder(2, assignments=[new_row(2)]),
    ],
)
def test_a_row_is_never_lost_and_a_place_never_shared(wrong: BatchReorder) -> None:
    with pytest.raises(HearthError) as caught:
        wrong.settle([7, 8, 9], lambda _: 0)
    assert caught.value.code == "internal"


def _random_request(tokens: int, max_tokens: int) -> RowRequest:
    options = RequestOptions(max_tokens=max_tokens)
    return RowRequest(token_ids=[1] * tokens, prompt_length=tokens, options=options)


Unread = list[tuple[DecodingRow, int]]


class House:
    """A model of what owners hold by place: which slot of which row, and what may not be finite.

    A slot that nobody has read is `bad`. Steps, and what they leave behind a row, are as a device
    that runs ahead and pads has them.
    """

    def __init__(self, room: int) -> None:
        self.context = DecodingInferenceContext(CONFIG, room)
        self.room = room
        self.slots: list[list[object]] = [[None] * SLOTS for _ in range(PLACES)]
        self.bad: list[set[int]] = [set() for _ in range(PLACES)]
        self.queued: list[Unread] = []

    def arrange(self) -> None:
        before = self.context.rows
        reorder = self.context.arrange(pair for step in self.queued for pair in step)
        if reorder is None:
            return
        taken = {place for place, row in enumerate(before) if row.runs_on}
        for source, target, used in reorder.moves:
            assert source in taken
            assert target not in taken
            taken ^= {source, target}
            self.slots[target][:used] = self.slots[source][:used]
            moved = {slot for slot in self.bad[source] if slot < used}
            self.bad[target] = {slot for slot in self.bad[target] if slot >= used} | moved
        for place, *_ in reorder.assignments:
            assert place not in taken
            taken.add(place)
        assert taken == set(range(reorder.rows)) == set(range(len(self.context.rows)))
        for place, begin, end in reorder.stale:
            assert 0 <= begin < end <= SLOTS
            self.bad[place] -= set(range(begin, end))

    def write(self, rows: list[DecodingRow], lengths: list[int], first: int) -> None:
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True), first):
            for slot in range(row.filled, row.filled + length):
                self.slots[place][slot] = (row, slot)
                self.bad[place].add(slot)
        self.queued.append(list(zip(rows, lengths, strict=True)))

    def decode(self, width: int) -> None:
        """A decode step, or a round of one accepted node, of all places."""
        rows = self.context.rows
        for place, row in enumerate(rows):
            tree = width if place < self.context.decoding else 1
            self.bad[place] |= set(range(row.filled, row.filled + tree))
        self.write(self.context.decoders, [1] * self.context.decoding, 0)
        self.context.decoded()

    def prefill(self, rows: int, width: int) -> None:
        joiners = self.context.joiners[:rows]
        lengths = [min(width, row.prompt_left) for row in joiners]
        self.write(joiners, lengths, self.context.decoding)
        self.context.prefilled(lengths)

    def read(self, *, fails: bool) -> None:
        """The numbers of the oldest step are finite, but for its first row where that fails."""
        for row, _ in self.queued.pop(0):
            if fails and row.state is RowState.LIVE:
                row.take(None)
                fails = False
            elif row in self.context.rows and row.state is not RowState.FAILED:
                place = self.context.rows.index(row)
                self.bad[place] -= set(range(row.filled)) - self.unread(row)

    def unread(self, row: DecodingRow) -> set[int]:
        added = sum(count for step in self.queued for other, count in step if other is row)
        return set(range(row.filled - added, row.filled))

    def check(self) -> None:
        context = self.context
        lefts = [row.prompt_left for row in context.rows]
        assert not any(lefts[: context.decoding])
        assert all(lefts[context.decoding :])
        assert lefts[context.decoding :] == sorted(lefts[context.decoding :])
        assert len(context.rows) + context.places <= PLACES + len(context.rows)
        for place, row in enumerate(context.rows):
            assert self.slots[place][: row.filled] == [(row, slot) for slot in range(row.filled)]
            # Of slots that the next step does not write, only those of its own steps are unread.
            tree = set(range(row.filled, row.filled + self.room))
            assert self.bad[place] <= self.unread(row) | tree


EVENT = st.tuples(
    st.sampled_from(["admit", "chunk", "decode", "round", "read", "fail", "leave", "end"]),
    st.integers(0, 7),
    st.integers(1, 40),
)


@settings(max_examples=300)
@given(st.lists(EVENT, min_size=20, max_size=60), st.sampled_from([1, 5]))
def test_rows_keep_their_slots_and_get_none_of_others(
    events: list[tuple[str, int, int]], room: int
) -> None:
    house = House(room)
    context = house.context
    for kind, chosen, size in events:
        if kind == "admit" and context.free:
            assert 0 <= context.free <= PLACES
            context.admit([_random_request(size, max_tokens=1 + chosen)])
        elif kind in {"leave", "end"} and context.rows:
            row = context.rows[chosen % len(context.rows)]
            context.leave(row.number)
        elif kind in {"read", "fail"} and house.queued:
            house.read(fails=kind == "fail")
        elif kind in {"chunk", "decode", "round"}:
            house.arrange()
            house.check()
            if kind == "chunk" and context.joiners:
                house.prefill(1 + chosen % 2, size)
            elif kind != "chunk" and context.decoding:
                house.decode(room if kind == "round" else 1)
