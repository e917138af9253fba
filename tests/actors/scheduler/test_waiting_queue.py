from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth.actors.messages import ExecutorLimits
from hearth.actors.scheduler.admission import Refusal, queue_refusal, size_refusal, within_share
from hearth.actors.scheduler.request_state import RequestState
from hearth.actors.scheduler.waiting_queue import WaitingQueue
from hearth.actors.settings import PolicySettings
from hearth.runtime.errors import CODES
from tests.actors.scheduler.simulation import entry


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


LIMITS = ExecutorLimits(max_batch=2, max_prompt_tokens=50, max_total_tokens=100)
SETTINGS = PolicySettings(queue_requests=3, queue_tokens=60)


def check(refusal: Refusal | None, code: str, field: str) -> None:
    assert refusal is not None
    assert (refusal.code, refusal.field) == (code, field)
    assert refusal.code in CODES


def test_the_queue_refuses_by_requests() -> None:
    assert queue_refusal(entry(9), 2, 2, 0, SETTINGS) is None
    check(queue_refusal(entry(9), 3, 3, 0, SETTINGS), "queue_full", "queue_requests")


def test_the_queue_refuses_by_prompt_tokens_and_still_takes_short_ones() -> None:
    assert queue_refusal(entry(9, prompt=20), 1, 40, 0, SETTINGS) is None
    check(queue_refusal(entry(9, prompt=21), 1, 40, 0, SETTINGS), "queue_full", "queue_tokens")


def test_a_refusal_by_tokens_says_how_many_have_to_go_before() -> None:
    for prompt, ahead in ((21, 1), (40, 1), (41, 2), (60, 2)):
        refusal = queue_refusal(entry(9, prompt=prompt), 2, 40, 0, SETTINGS)
        assert refusal is not None
        assert refusal.ahead == ahead


def test_one_client_leaves_room_for_the_prompt_of_another() -> None:
    assert queue_refusal(entry(9, prompt=15), 2, 30, 30, SETTINGS) is None
    refusal = queue_refusal(entry(9, prompt=16), 2, 30, 30, SETTINGS)
    check(refusal, "too_many_requests", "client_queue_share")
    assert queue_refusal(entry(9, prompt=30), 2, 30, 0, SETTINGS) is None


@pytest.mark.parametrize("clients", [1, 2, 5, 20])
def test_however_many_clients_flood_there_is_room_for_the_first_request_of_another(
    clients: int,
) -> None:
    limit, share = 256, 0.75
    waiting = [0] * clients
    for _ in range(limit):
        for client in range(clients):
            if sum(waiting) < limit and within_share(
                waiting[client], 1, sum(waiting), limit, share
            ):
                waiting[client] += 1
    assert sum(waiting) < limit
    assert max(waiting) - min(waiting) <= 1
    if clients == 1:
        assert waiting == [192]


def test_whoever_has_the_whole_queue_for_its_share_is_not_held_back() -> None:
    assert within_share(255, 1, 255, 256, share=1.0)


@pytest.mark.parametrize(
    ("prompt", "tokens", "code", "field"),
    [
        (0, 1, "prompt_empty", "prompt"),
        (51, 1, "prompt_too_long", "prompt"),
        (50, 51, "capacity_exceeded", "max_tokens"),
    ],
)
def test_the_executor_s_limits_refuse(prompt: int, tokens: int, code: str, field: str) -> None:
    request = entry(1, prompt=prompt, tokens=tokens)
    check(size_refusal(request, SETTINGS, LIMITS), code, field)


def test_exactly_the_limits_are_taken() -> None:
    assert size_refusal(entry(1, prompt=50, tokens=50), SETTINGS, LIMITS) is None
    assert size_refusal(entry(1, prompt=1, tokens=99), SETTINGS, LIMITS) is None


def test_a_prompt_that_could_never_wait_is_too_long() -> None:
    settings = PolicySettings(queue_tokens=9)
    assert size_refusal(entry(1, prompt=9), settings, None) is None
    check(size_refusal(entry(1, prompt=10), settings, None), "prompt_too_long", "prompt")


def test_the_message_says_what_would_fit() -> None:
    refusal = size_refusal(entry(1, prompt=30, tokens=80), SETTINGS, LIMITS)
    assert refusal is not None
    assert refusal.message.endswith("ask for at most 70")


def test_without_max_tokens_one_token_has_to_fit() -> None:
    whole = structs.replace(LIMITS, max_prompt_tokens=100)
    settings = PolicySettings(queue_tokens=1000)
    for prompt, fits in ((99, True), (100, False)):
        waiting = entry(1, prompt=prompt, tokens=None)
        refusal = size_refusal(waiting, settings, whole)
        assert (refusal is None) is fits
