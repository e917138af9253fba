import math
import os

import anyio
import pytest

from hearth.daemon import watchdog as module
from hearth.daemon.watchdog import LoopHealth, Watchdog, is_well, watched_s, worst

WATCHED = {"WATCHDOG_USEC": "3000000"}


class Supervisor:
    """One that turns, in seconds of a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turned = 0.0
        self.due: float | None = None

    def __call__(self) -> LoopHealth:
        return LoopHealth(self.now, self.turned, self.due)

    def turn(self, now: float, due: float | None = None) -> None:
        self.now = self.turned = now
        self.due = due


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        ({}, None),
        (WATCHED, 3.0),
        (WATCHED | {"WATCHDOG_PID": str(os.getpid())}, 3.0),
        (WATCHED | {"WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_interval_is_for_the_process_that_the_manager_means(
    environ: dict[str, str], interval: float | None
) -> None:
    assert watched_s(environ) == interval


def test_a_supervisor_is_well_while_it_turns_and_acts_in_time() -> None:
    assert is_well(LoopHealth(now=100, turned=99, due=160))
    assert is_well(LoopHealth(now=100, turned=99, due=None))
    assert is_well(LoopHealth(now=100, turned=99, due=99)), "it is about to act"
    assert not is_well(LoopHealth(now=100, turned=80, due=160)), "it does not turn"
    assert not is_well(LoopHealth(now=100, turned=99, due=80)), "it turns, and does not act"


def test_of_several_supervisors_one_that_is_not_well_is_told_of() -> None:
    well, hangs = LoopHealth(now=100, turned=99, due=None), LoopHealth(now=100, turned=80, due=None)
    assert worst(iter([well, hangs])) is hangs
    assert worst([well, LoopHealth(now=7, turned=7, due=None)]) is well


def test_the_manager_hears_nothing_of_a_supervisor_that_hangs() -> None:
    supervisor = Supervisor()
    dog = Watchdog(supervisor, lambda: 300.0, WATCHED)
    dog.serves()
    supervisor.turn(50, due=110)
    assert dog.words() == ["WATCHDOG=1"]
    supervisor.now = 70
    assert dog.words() == []
    supervisor.turn(71, due=130)
    assert dog.words() == ["WATCHDOG=1"]


def test_an_executor_that_hangs_is_no_reason_while_the_supervisor_replaces_it() -> None:
    supervisor = Supervisor()
    dog = Watchdog(supervisor, lambda: 300.0, WATCHED)
    dog.serves()
    # No progress for its 60 s, then killed, then ten seconds for its end.
    for now in range(61):
        supervisor.turn(now, due=60)
        assert dog.words() == ["WATCHDOG=1"]
    supervisor.turn(61, due=70)
    assert dog.words() == ["WATCHDOG=1"]


def test_a_start_is_extended_piece_by_piece_up_to_its_limit() -> None:
    supervisor = Supervisor()
    dog = Watchdog(supervisor, lambda: 20.0, {})
    assert dog.words() == ["EXTEND_TIMEOUT_USEC=15000000"]
    supervisor.turn(12)
    assert dog.words() == ["EXTEND_TIMEOUT_USEC=8000000"]
    supervisor.turn(20)
    assert dog.words() == []
    ready = Watchdog(supervisor, lambda: 300.0, {})
    ready.serves()
    assert ready.words() == []


def test_a_start_that_goes_on_takes_another_limit_and_one_that_is_over_none() -> None:
    supervisor = Supervisor()
    limit = 20.0
    dog = Watchdog(supervisor, lambda: limit, WATCHED)
    supervisor.turn(19)
    limit = 100.0
    assert dog.words() == ["WATCHDOG=1", "EXTEND_TIMEOUT_USEC=15000000"]
    dog.serves()
    limit = 300.0
    assert dog.words() == ["WATCHDOG=1"]


def test_a_stop_is_extended_by_what_it_may_take() -> None:
    supervisor = Supervisor()
    dog = Watchdog(supervisor, lambda: 20.0, WATCHED)
    dog.serves()
    supervisor.turn(1000)
    dog.stops(60)
    assert dog.words() == ["WATCHDOG=1", "EXTEND_TIMEOUT_USEC=15000000"]
    supervisor.turn(1055)
    assert dog.words() == ["WATCHDOG=1", "EXTEND_TIMEOUT_USEC=5000000"]
    supervisor.turn(1061)
    assert dog.words() == ["WATCHDOG=1"]


def test_it_sleeps_as_long_as_the_manager_lets_it() -> None:
    dog = Watchdog(Supervisor(), lambda: 20.0, {"WATCHDOG_USEC": "30000000"})
    assert dog.pause_s == 1.0
    dog.serves()
    assert dog.pause_s == 10.0
    dog.stops(60)
    assert dog.pause_s == 1.0
    alone = Watchdog(Supervisor(), lambda: 20.0, {})
    alone.serves()
    assert alone.pause_s == math.inf


@pytest.mark.anyio
async def test_it_speaks_again_and_again_and_is_silent_when_there_is_nothing_to_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    enough = anyio.Event()

    def notify(message: str, *, patience_s: float) -> None:
        assert patience_s == 0
        said.append(message)
        supervisor.turn(20)
        if len(said) == 3:
            enough.set()

    monkeypatch.setattr(module, "notify", notify)
    supervisor = Supervisor()
    dog = Watchdog(supervisor, lambda: 20.0, {"WATCHDOG_USEC": "3000"})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dog.run)
        with anyio.fail_after(20):
            await enough.wait()
        tasks.cancel_scope.cancel()
    assert said == ["WATCHDOG=1\nEXTEND_TIMEOUT_USEC=15000000", "WATCHDOG=1", "WATCHDOG=1"]
