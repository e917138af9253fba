from __future__ import annotations

from hearth.actors.messages import Request
from hearth.actors.scheduler import quarantine as module
from hearth.actors.scheduler.quarantine import MEMORY_S, Quarantine
from hearth.actors.scheduler.request_state import RequestState
from hearth.runtime.request import RequestOptions


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
