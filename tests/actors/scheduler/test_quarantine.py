"""Requests that fail the executor are found and refused; those beside them are not."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from hearth.actors.messages import Accepted, Failed, Request, Schedule
from hearth.actors.scheduler import quarantine as module
from hearth.actors.scheduler.policy import Decision, SchedulerPolicy
from hearth.actors.scheduler.quarantine import MEMORY_S, Quarantine
from hearth.actors.scheduler.request_state import RequestState
from hearth.actors.settings import PolicySettings
from hearth.runtime.request import RequestOptions
from tests.actors.scheduler.simulation import LIMITS, SEEN, output, ready, schedule_of

POISON, INNOCENT, OTHER = [6, 6, 6], [1, 2], [3, 4]


class Desk:
    """A policy with an executor, and a clock."""

    def __init__(self, places: int = 8) -> None:
        self.policy = SchedulerPolicy(PolicySettings(fill_wait_ms=0.0))
        self.now = 0.0
        self.rid = 0
        self.incarnation = 0
        self.limits = structs.replace(LIMITS, max_batch=places)
        self.start()

    def start(self) -> list[Decision]:
        """Have a new executor."""
        self.rows: list[int] = []
        self.incarnation += 1
        return self.policy.executor_ready(ready(self.limits, self.incarnation), self.now)

    def ask(self, *prompts: list[int]) -> list[Decision]:
        """Ask for a reply to each, as a client would that tries again: with a seed of its own."""
        decisions = []
        for prompt in prompts:
            self.rid += 1
            options = RequestOptions(max_tokens=9, seed=self.rid)
            decisions += self.policy.submit(Request(self.rid, options, token_ids=prompt), self.now)
        return decisions

    def offer(self) -> dict[int, list[int]]:
        """Let a second pass; the prompts of the rows that are offered then."""
        self.now += 1.0
        told = [one for one in self.policy.tick(self.now) if isinstance(one, Schedule)]
        return {rid: row.token_ids for one in told for rid, row in one.new.items()}

    def run(self) -> list[list[int]]:
        """Offer what is next, and give it places; the prompts."""
        offered = self.offer()
        self.rows += offered
        self.tell(placed=list(offered))
        return list(offered.values())

    def end(self) -> None:
        self.tell(finished=self.rows)
        self.rows = []

    def tell(self, **changes: Any) -> list[Decision]:
        """Have the executor tell this of its rows."""
        return self.policy.update(output(self.incarnation, SEEN, **changes), self.now)

    def cancel(self) -> None:
        """Cancel the last request, which the executor has."""
        self.policy.cancel(self.rid)
        assert schedule_of(self.policy.tick(self.now)).cancelled == [self.rid]

    def die(self) -> list[Decision]:
        """Lose the executor, of whose offered rows nobody has heard, and have another one."""
        decisions = self.policy.executor_lost("it was ended by SIGSEGV", self.now)
        return decisions + self.start()


def codes(decisions: list[Decision]) -> list[str]:
    return [one.code for one in decisions if isinstance(one, Failed)]


def test_the_second_death_refuses_the_request_by_name_and_nobody_beside_it() -> None:
    desk = Desk()
    desk.ask(INNOCENT, POISON, OTHER)
    assert desk.run() == [INNOCENT, POISON, OTHER]
    assert codes(desk.die()) == ["executor_failed"]
    desk.ask(INNOCENT, POISON, OTHER)
    assert desk.run() == [INNOCENT]
    desk.end()
    assert desk.run() == [POISON]
    assert codes(desk.die()) == ["executor_failed"]
    assert codes(desk.ask(POISON)) == ["repeated_failure"]
    assert desk.run() == [OTHER]
    desk.end()
    assert [type(one) for one in desk.ask(INNOCENT, OTHER)] == [Accepted, Accepted]
    assert desk.run() == [INNOCENT, OTHER]


def test_others_share_a_batch_up_to_a_suspect_and_behind_it() -> None:
    desk = Desk()
    desk.ask(POISON)
    desk.run()
    desk.die()
    desk.ask(INNOCENT, OTHER, POISON, OTHER, INNOCENT)
    assert desk.run() == [INNOCENT, OTHER]
    desk.end()
    assert desk.run() == [POISON]
    desk.end()
    assert desk.run() == [OTHER, INNOCENT]


def test_a_failure_that_the_executor_told_counts_once() -> None:
    desk = Desk()
    desk.ask(POISON, INNOCENT)
    desk.run()
    told = Failed(desk.rows, "executor_failed", "the device failed")
    assert desk.tell(failed=[told]) == []
    desk.die()
    assert desk.tell(failed=[told]) == []
    assert codes(desk.ask(POISON)) == []
    assert desk.run() == [POISON]


def test_who_runs_when_a_file_is_changed_is_no_suspect() -> None:
    desk = Desk()
    for _ in range(3):
        desk.ask(INNOCENT, OTHER)
        assert desk.run() == [INNOCENT, OTHER]
        lost = desk.policy.executor_lost("weights is changed in place", desk.now, blameless=True)
        assert codes(lost) == ["executor_failed"]
        desk.start()


def test_a_row_that_fails_by_itself_is_no_suspect() -> None:
    desk = Desk()
    desk.ask(POISON)
    desk.run()
    desk.tell(failed=[Failed(desk.rows, "out_of_memory", "no room")])
    desk.ask(POISON, INNOCENT)
    assert desk.run() == [POISON, INNOCENT]


def test_a_twin_that_waits_is_refused_with_it() -> None:
    desk = Desk()
    desk.ask(POISON)
    desk.run()
    desk.die()
    desk.ask(POISON, POISON, INNOCENT)
    assert desk.run() == [POISON]
    assert codes(desk.die()) == ["executor_failed", "repeated_failure"]
    assert desk.run() == [INNOCENT]


def test_a_refusal_is_forgotten_after_some_time() -> None:
    desk = Desk()
    for _ in range(2):
        desk.ask(POISON)
        desk.run()
        desk.die()
    assert codes(desk.ask(POISON)) == ["repeated_failure"]
    desk.now += MEMORY_S
    assert codes(desk.ask(POISON)) == []


def test_a_request_that_was_cancelled_while_the_executor_hung_is_suspected() -> None:
    desk = Desk()
    for _ in range(2):
        assert codes(desk.ask(POISON)) == []
        assert desk.run() == [POISON]
        desk.cancel()
        assert codes(desk.die()) == []
    assert codes(desk.ask(POISON)) == ["repeated_failure"]


def test_a_suspect_that_ends_at_a_stop_string_is_cleared() -> None:
    desk = Desk()
    desk.ask(INNOCENT)
    desk.run()
    desk.die()
    desk.ask(INNOCENT)
    assert desk.run() == [INNOCENT]
    # The tokenizer found the stop string and has the executor drop the row.
    desk.cancel()
    desk.end()
    desk.ask(INNOCENT, OTHER)
    assert desk.run() == [INNOCENT, OTHER]


def test_what_was_offered_when_the_executor_died_waits_and_is_suspected() -> None:
    desk = Desk(places=1)
    desk.ask(INNOCENT, POISON, OTHER)
    assert desk.run() == [INNOCENT]
    assert list(desk.offer().values()) == [POISON]
    # It may have got the place of the first one, and nobody has heard of that.
    assert codes(desk.die()) == ["executor_failed"]
    assert desk.run() == [POISON]
    assert desk.offer() == {}
    assert codes(desk.die()) == ["executor_failed"]
    assert codes(desk.ask(POISON)) == ["repeated_failure"]
    assert desk.run() == [OTHER]
    desk.end()
    assert [type(one) for one in desk.ask(INNOCENT)] == [Accepted]


def test_a_row_that_kills_the_executor_before_anybody_hears_of_it_is_refused() -> None:
    desk = Desk()
    desk.ask(POISON)
    assert list(desk.offer().values()) == [POISON]
    assert codes(desk.die()) == []
    assert list(desk.offer().values()) == [POISON]
    assert codes(desk.die()) == ["repeated_failure"]
    assert desk.offer() == {}


def test_a_row_that_has_its_place_fails_once_and_counts_once() -> None:
    desk = Desk()
    desk.ask(POISON)
    assert desk.run() == [POISON]
    (rid,) = desk.rows
    assert codes(desk.die()) == ["executor_failed"]
    desk.policy.cancel(rid)
    assert codes(desk.ask(POISON)) == []
    assert desk.run() == [POISON]


def test_a_late_output_of_a_dead_executor_does_not_touch_the_next_one() -> None:
    desk = Desk()
    desk.ask(INNOCENT)
    (rid,) = desk.offer()
    desk.die()
    assert list(desk.offer()) == [rid]
    for late in (output(1, placed=[rid]), output(1, finished=[rid]), output(1, seq=SEEN)):
        desk.policy.update(late, desk.now)
    assert desk.offer() == {}
    desk.tell(placed=[rid])
    assert desk.policy.report(0).running == 1


def test_a_request_that_is_cancelled_while_there_is_no_executor_is_gone() -> None:
    desk = Desk()
    desk.ask(OTHER)
    (rid,) = desk.offer()
    desk.policy.executor_lost("it was ended by SIGSEGV", desk.now)
    desk.policy.cancel(rid)
    desk.start()
    assert desk.offer() == {}


def test_a_suspect_that_is_offered_is_left_there_whatever_else_is_told() -> None:
    desk = Desk()
    desk.ask(POISON)
    desk.run()
    desk.die()
    desk.ask(POISON)
    (rid,) = desk.offer()
    desk.tell(missing=[77])
    assert desk.policy.tick(desk.now) == []
    desk.tell(placed=[rid])
    assert desk.policy.report(0).running == 1


def test_twins_that_are_offered_beside_a_failure_are_taken_back() -> None:
    desk = Desk(places=2)
    desk.ask(POISON, INNOCENT, POISON, OTHER)
    assert desk.run() == [POISON, INNOCENT]
    twin, _ = desk.offer()
    desk.tell(failed=[Failed(desk.rows[:1], "executor_failed", "its prefill failed")])
    assert twin not in schedule_of(desk.policy.tick(desk.now)).rows
    desk.policy.update(output(seq=SEEN), desk.now)
    assert desk.offer() == {}


def test_the_house_empties_for_a_suspect_within_two_seconds() -> None:
    desk = Desk()
    desk.ask(POISON)
    desk.run()
    desk.die()
    desk.ask(INNOCENT, OTHER)
    assert desk.run() == [INNOCENT, OTHER]
    placed = desk.now
    desk.ask(POISON)
    assert desk.policy.tick(placed + 1.9) == []
    assert desk.policy.next_wake() == placed + 2.0
    assert schedule_of(desk.policy.tick(placed + 2.0)).preempted == desk.rows


def test_rows_that_prefill_leave_for_a_suspect_with_the_others() -> None:
    desk = Desk()
    desk.ask(POISON)
    desk.run()
    desk.die()
    desk.ask(INNOCENT, OTHER)
    desk.run()
    desk.tell(slot_times={desk.rows[0]: desk.now})
    desk.ask(POISON)
    assert schedule_of(desk.policy.tick(desk.now + 2.0)).preempted == desk.rows


def entry(rid: int, token: int = 1, seed: int | None = None, max_tokens: int = 8) -> RequestState:
    options = RequestOptions(seed=seed, max_tokens=max_tokens)
    return RequestState(Request(rid, options, token_ids=[token, 2, 3]), queued=0.0)


def test_who_ran_when_the_executor_failed_runs_alone_and_a_second_time_is_guilty() -> None:
    quarantine = Quarantine()
    assert not quarantine.runs_alone(entry(1))
    quarantine.failed([entry(1), entry(2, token=7)], 0.0)
    assert quarantine.runs_alone(entry(3))
    assert quarantine.runs_alone(entry(4, token=7))
    assert not quarantine.runs_alone(entry(5, token=9))
    quarantine.ended(entry(3))
    assert not quarantine.runs_alone(entry(6))
    quarantine.failed([entry(4, token=7)], 1.0)
    assert quarantine.is_guilty(entry(8, token=7))
    assert not quarantine.is_guilty(entry(9))


def test_a_request_is_known_by_what_it_asks_but_for_its_seed() -> None:
    quarantine = Quarantine()
    quarantine.failed([entry(1, seed=5)], 0.0)
    assert quarantine.runs_alone(entry(2, seed=6))
    assert not quarantine.runs_alone(entry(3, max_tokens=9))


def test_twins_in_one_batch_have_failed_once() -> None:
    quarantine = Quarantine()
    quarantine.failed([entry(1), entry(2)], 0.0)
    assert not quarantine.is_guilty(entry(3))


def test_failures_are_forgotten_with_time() -> None:
    quarantine = Quarantine()
    quarantine.failed([entry(1)], 0.0)
    quarantine.failed([entry(2, token=7)], 10.0)
    quarantine.forget(MEMORY_S)
    assert not quarantine.runs_alone(entry(3))
    assert quarantine.runs_alone(entry(4, token=7))


def test_the_memory_is_bounded() -> None:
    quarantine = Quarantine()
    quarantine.failed([entry(rid, token=rid) for rid in range(module.SUSPECTS)], 0.0)
    quarantine.failed([entry(1, token=-1)], 1.0)
    assert len(quarantine._failures) == module.SUSPECTS
    assert quarantine.runs_alone(entry(2, token=-1))
