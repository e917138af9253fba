"""Who is refused and comes again when it was told to is mostly taken: clients beside a queue."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest

from hearth.actors.settings import PolicySettings, Reloadable
from hearth.daemon.door.retry_after import GRACE_S, LEAST_S, MOST_S, Pace, RetryAfter

PLACES = 8


def hints_of(queue: int, now: float) -> RetryAfter:
    return RetryAfter(Reloadable(PolicySettings(queue_requests=queue)), now)


class Shop:
    """`PLACES` that serve, `queue` that wait, and clients who heed what they are told, or do not.

    A client asks for one thing at a time: again at once when it was served, and when it is refused
    after the time that it was told (`patient`) or after a moment of its own.
    """

    def __init__(self, queue: int, patient: int, greedy: int, service_s: float) -> None:
        self.hints = hints_of(queue, 0.0)
        self.hints.executor(0.0, ready=True, working=True)
        self.queue, self.patient, self.service_s = queue, patient, service_s
        self.waiting: list[int] = []
        self.chance = random.Random(1)
        # When, which client, whether it comes as told.
        self.arrivals = [(0.001 * client, client, False) for client in range(patient + greedy)]
        self.ends: list[tuple[float, int]] = []
        self.served = 0
        self.told: list[tuple[float, bool]] = []

    def run(self, seconds: float) -> None:
        now = 0.0
        while now < seconds:
            if self.ends and (not self.arrivals or self.ends[0] <= self.arrivals[0]):
                now, client = heapq.heappop(self.ends)
                self._end(now, client)
            else:
                now, client, as_told = heapq.heappop(self.arrivals)
                self._ask(now, client, as_told=as_told)

    def _ask(self, now: float, client: int, *, as_told: bool) -> None:
        taken = self.hints.admits(client, self.queue - len(self.waiting), now)
        if as_told:
            self.told.append((now, taken))
        if taken:
            self.waiting.append(client)
            self._serve(now)
            return
        told = self.hints.after("queue_full", client, now)
        assert told is not None
        assert LEAST_S <= told <= MOST_S
        heeds = client < self.patient
        after = told + 0.02 * self.chance.random() if heeds else 0.03
        heapq.heappush(self.arrivals, (now + after, client, heeds))

    def _end(self, now: float, client: int) -> None:
        self.served += 1
        self.hints.ended(now)
        heapq.heappush(self.arrivals, (now + 0.001, client, False))
        self._serve(now)

    def _serve(self, now: float) -> None:
        if self.waiting and len(self.ends) < PLACES:
            until = now + self.service_s * (0.5 + self.chance.random())
            heapq.heappush(self.ends, (until, self.waiting.pop(0)))


@pytest.mark.parametrize(
    ("queue", "patient", "greedy", "least"),
    [(16, 100, 0, 0.9), (64, 300, 0, 0.9), (16, 20, 20, 0.75), (256, 400, 64, 0.5)],
)
def test_who_comes_again_when_told_to_is_mostly_taken(
    queue: int, patient: int, greedy: int, least: float
) -> None:
    shop = Shop(queue, patient, greedy, service_s=0.16)
    shop.run(25.0)
    # The first moments have no pace to go by.
    settled = [taken for when, taken in shop.told if when > 5.0]
    assert len(settled) > 200
    assert sum(settled) / len(settled) > least
    # Nothing stands still for those who are waited for.
    assert shop.served > 0.97 * 25 * PLACES / 0.16


def test_where_nobody_who_was_told_comes_all_places_are_used() -> None:
    hints = hints_of(16, 0.0)
    hints.executor(0.0, ready=True, working=True)
    for client in range(100):
        hints.after("queue_full", client, 0.0)
    free = 16
    # Only a fourth of the queue is kept, and that for a moment.
    taken = sum(hints.admits(1000, free - one, 1.0) for one in range(free))
    assert taken >= 12
    assert hints.admits(1000, 1, MOST_S + 2 * GRACE_S)


def test_a_pace_counts_the_time_of_work_alone() -> None:
    pace = Pace()
    pace.works(10.0, working=True)
    assert pace.seconds(10.05) == 0.1
    assert pace.seconds(13.0) == 3.0
    pace.ended(11.0)
    pace.ended(12.0)
    pace.works(12.0, working=False)
    assert pace.seconds(500.0) == 1.0
    pace.works(500.0, working=True)
    for one in range(200):
        pace.ended(500.0 + 0.1 * one)
    assert pace.seconds(519.9) == pytest.approx(0.1)


def test_each_is_told_a_time_of_its_own() -> None:
    hints = hints_of(256, 0.0)
    hints.executor(0.0, ready=True, working=True)
    for tenth in range(100):
        hints.ended(tenth / 10)
    now = 10.0
    told = [hints.after("queue_full", client, now) for client in range(5)]
    times = [0.0 if one is None else one for one in told]
    gaps = [later - one for one, later in itertools.pairwise(times)]
    assert gaps == [pytest.approx(0.11, rel=0.05)] * 4
    # One with a long prompt for which ten have to go.
    behind = hints.after("queue_full", 9, now, ahead=10)
    assert behind == pytest.approx(1.0, rel=0.05)


def test_who_asks_without_rest_is_told_no_more_times_than_a_few() -> None:
    hints = hints_of(256, 0.0)
    hints.executor(0.0, ready=True, working=True)
    told = [hints.after("queue_full", 1, 0.0005 * one) for one in range(50)]
    assert max(one or 0.0 for one in told) <= 4 * 0.11 + 0.1
    other = hints.after("queue_full", 2, 0.025)
    assert other == pytest.approx(0.5, abs=0.1)


def test_while_no_executor_works_it_is_as_long_as_the_last_one_took_to_load() -> None:
    hints = hints_of(16, 100.0)
    hints.executor(120.0, ready=True, working=False)
    assert hints.after("executor_failed", 1, 125.0) == LEAST_S
    assert hints.after("encoder_failed", 1, 125.0) == 20.0
    hints.executor(130.0, ready=False, working=True)
    assert hints.after("executor_failed", 1, 130.0) == 20.0
    assert hints.after("executor_failed", 1, 145.0) == 5.0
    assert hints.after("queue_full", 1, 145.0) == 5.1
    # It is late: as long again.
    assert hints.after("executor_failed", 1, 160.0) == 10.0
    hints.executor(161.0, ready=True, working=True)
    hints.stops(171.0)
    assert hints.after("shutting_down", 1, 165.0) == 6.0 + 31.0


def test_a_client_with_too_much_open_waits_for_its_own() -> None:
    hints = hints_of(256, 0.0)
    hints.executor(0.0, ready=True, working=True)
    for tenth in range(100):
        hints.ended(tenth / 10)
    # A fourth of what is open is its own, so one of four ends is.
    told = [hints.after("too_many_requests", 1, 9.9, own=64, open_now=256) for _ in range(3)]
    assert told == [pytest.approx(0.4 * times, rel=0.05) for times in (1, 2, 3)]
    hints.client_left(1, 9.9)
    told = [hints.after("too_many_requests", 1, 9.9, own=64, open_now=256)]
    assert told == [pytest.approx(0.4, rel=0.05)]


def test_places_of_clients_free_as_they_have_before() -> None:
    hints = hints_of(256, 0.0)
    assert hints.after("too_many_clients", 0, 20.0) == 20.0
    hints.client_left(1, 20.0)
    hints.client_left(2, 24.0)
    assert hints.after("too_many_clients", 0, 24.0) == 12.0


def test_where_waiting_is_vain_nothing_is_told() -> None:
    hints = hints_of(256, 0.0)
    assert hints.after("prompt_too_long", 1, 1.0) is None
    assert hints.after("slow_client", 1, 1.0) is None
