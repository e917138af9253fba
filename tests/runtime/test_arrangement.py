import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.runtime.batch import BatchReorder, RowMove, SlotAssignment
from hearth.runtime.errors import HearthError
from tests.runtime.arrangements import REQUEST, arrangements

PLACES = 6


@given(st.data())
def test_rows_that_move_one_by_one_settle_where_the_moves_say(data: st.DataObject) -> None:
    kept = list(range(10, 10 + data.draw(st.integers(0, PLACES))))
    reorder = data.draw(arrangements(kept, PLACES))
    board: list[int | None] = [*kept, *[None] * (PLACES - len(kept))]
    for source, target, _ in reorder.moves:
        board[target] = board[source]
    for place, *_ in reorder.assignments:
        board[place] = 0
    assert reorder.settle(kept, lambda _: 0) == board[: reorder.rows]


def test_a_fresh_house_seats_its_rows_in_order() -> None:
    fresh = BatchReorder.fresh([REQUEST, REQUEST])
    assert fresh == BatchReorder(2, (), [SlotAssignment(0, REQUEST), SlotAssignment(1, REQUEST)])
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
        BatchReorder(2, [RowMove(2, 1, 3)], [SlotAssignment(1, REQUEST)]),
        BatchReorder(2, assignments=[SlotAssignment(1, REQUEST), SlotAssignment(1, REQUEST)]),
        BatchReorder(2, assignments=[SlotAssignment(2, REQUEST)]),
    ],
)
def test_a_row_is_never_lost_and_a_place_never_shared(wrong: BatchReorder) -> None:
    with pytest.raises(HearthError) as caught:
        wrong.settle([7, 8, 9], lambda _: 0)
    assert caught.value.code == "internal"
