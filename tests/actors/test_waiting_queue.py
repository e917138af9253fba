from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from actors.waiting_queue import Entry, WaitingQueue
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


def test_clients_take_turns_from_the_moment_at_which_they_have_one() -> None:
    queue = WaitingQueue(5.0)
    for rid in range(4):
        queue.push(entry(rid, queued=0.0, client=1))
    queue.push(entry(10, queued=3.0, client=2))
    assert queue.take(2.0).rid == 0
    # Since 2.0, when its client's latest was taken.
    assert queue.take(4.0).rid == 1
    assert queue.take(5.0).rid == 10
    assert taken(queue) == [2, 3]


def test_at_one_moment_turns_go_to_who_was_served_longest_ago() -> None:
    queue = WaitingQueue(5.0)
    for rid in range(9):
        queue.push(entry(rid, queued=1.0, client=rid // 3))
    assert taken(queue, now=1.0) == [0, 3, 6, 1, 4, 7, 2, 5, 8]


def test_who_was_taken_in_vain_stands_where_it_stood() -> None:
    queue = WaitingQueue(5.0)
    for rid in (1, 2, 3):
        queue.push(entry(rid, queued=0.0, client=1))
    queue.push(entry(10, queued=3.5, client=2))
    queue.take(2.0)
    first = queue.take(4.0)
    assert first.rid == 2
    for others in ((), (3,)):
        for rid in others:
            queue.remove(rid)
        queue.put_back(first)
        assert (queue.order, queue.take(6.0)) == (2.0, first)


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
    queue, model, now = WaitingQueue(2.0), dict[int, Entry](), 0.0
    last: dict[int, float] = {}
    out: list[Entry] = []
    for number, (action, value, client) in enumerate(actions):
        now += 0.5
        if action == "push":
            model[number] = entry(number, queued=now, priority=value, client=client, prompt=number)
            queue.push(model[number])
        elif action == "remove":
            assert queue.remove(value) is model.pop(value, None)
        elif action == "back" and out:
            again = out.pop()
            last[again.request.client] = min(last[again.request.client], again.since)
            model[again.rid] = again
            queue.put_back(again)
        for _ in range(value if action == "take" else 0):
            heads = {one.request.client: one for one in sorted(model.values(), key=place)[::-1]}
            keys = {
                one.rid: max(one.queued, last.get(one.request.client, 0.0))
                - 2 * one.request.priority
                for one in heads.values()
            }
            assert queue.order == min(keys.values(), default=math.inf)
            if not keys:
                break
            got = queue.take(now)
            assert keys[got.rid] == min(keys.values())
            last[got.request.client] = now
            out.append(model.pop(got.rid))
        assert len(queue) == len(model)
        assert queue.prompt_tokens == sum(one.prompt_tokens for one in model.values())
        assert queue.oldest == min((one.queued for one in model.values()), default=None)


def place(one: Entry) -> tuple[float, int]:
    return one.queued - 2 * one.request.priority, one.rid


def taken(queue: WaitingQueue, now: float = 9.0) -> list[int]:
    return [queue.take(now).rid for _ in range(len(queue))]
