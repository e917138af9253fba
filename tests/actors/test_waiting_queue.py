from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from hearth.actors.scheduler.request_state import RequestState
from hearth.actors.scheduler.waiting_queue import WaitingQueue
from tests.actors.simulation import entry


def test_equal_priorities_keep_the_order_of_arrival() -> None:
    queue = WaitingQueue(5.0)
    for rid in (3, 1, 2):
        queue.push(entry(rid, queued=float(rid == 2)))
    assert taken(queue) == [1, 3, 2]
    assert len(queue) == 0


def test_one_priority_is_worth_the_ageing_time() -> None:
    queue = WaitingQueue(5.0)
    queue.push(entry(1, queued=0.0, priority=0))
    queue.push(entry(2, queued=4.9, priority=1))
    queue.push(entry(3, queued=5.1, priority=1))
    assert taken(queue) == [2, 1, 3]


def test_a_row_that_continues_has_all_its_tokens() -> None:
    waiting = entry(4, prompt=2, tokens=8)
    waiting.generated = [7, 8]
    row = waiting.to_row()
    assert (row.token_ids, row.prompt_length) == ([1, 1, 7, 8], 2)
    assert row.options is waiting.request.options


def test_expired_requests_are_taken_out() -> None:
    queue = WaitingQueue(5.0)
    queue.push(entry(1, deadline=3.0))
    queue.push(entry(2, deadline=2.0))
    queue.push(entry(3))
    deadlines = [queue.next_deadline]
    assert [one.rid for one in queue.take_expired(2.0)] == [2]
    deadlines.append(queue.next_deadline)
    queue.remove(1)
    deadlines.append(queue.next_deadline)
    assert deadlines == [2.0, 3.0, None]
    assert queue.remove(1) is None


def test_the_first_of_each_line_is_told_in_order() -> None:
    queue = WaitingQueue(5.0)
    for rid in range(6):
        queue.push(entry(rid, queued=rid / 10, client=rid % 2, adapter="ab"[rid // 4]))
    assert [one.rid for _, one in queue.heads] == [0, 1, 4, 5]
    assert (queue.count_of(0), queue.count_of(1), queue.count_of(2)) == (3, 3, 0)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(-10, 10), st.integers(0, 2)),
        st.tuples(st.just("remove"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("take"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("back"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_it_agrees_with_sorting(actions: list[tuple[str, int, int]]) -> None:
    queue, model, now = WaitingQueue(2.0), dict[int, RequestState](), 0.0
    out: list[RequestState] = []
    for number, (action, value, client) in enumerate(actions):
        now += 0.5
        if action == "push":
            model[number] = entry(number, queued=now, priority=value, client=client, prompt=number)
            queue.push(model[number])
        elif action == "remove":
            assert queue.remove(value) is model.pop(value, None)
        elif action == "back" and out:
            again = out.pop()
            model[again.rid] = again
            queue.push(again)
        for _ in range(value if action == "take" else 0):
            first = min(model.values(), key=place, default=None)
            assert queue.first is first
            assert queue.order == (place(first)[0] if first else math.inf)
            if first is None:
                break
            assert queue.remove(first.rid) is first
            out.append(model.pop(first.rid))
        assert len(queue) == len(model)
        assert queue.prompt_tokens == sum(one.prompt_tokens for one in model.values())
        assert queue.oldest == min((one.queued for one in model.values()), default=None)


def place(one: RequestState) -> tuple[float, int]:
    return one.queued - 2 * one.request.priority, one.rid


def taken(queue: WaitingQueue) -> list[int]:
    found = []
    while queue.first is not None:
        found.append(queue.first.rid)
        queue.remove(found[-1])
    return found
