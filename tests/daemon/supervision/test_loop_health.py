"""How a supervisor does, and what its deadlines make of a machine that slept, without a process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from hearth.actors.mailbox import Sender
from hearth.actors.messages import ExecutorLimits
from hearth.actors.roles import HostConfig
from hearth.actors.supervisor_messages import ActorHello, ActorReady, SupervisorMessage
from hearth.daemon.supervision import supervisor as module
from hearth.daemon.watchdog import is_well
from hearth_client.running_clock import RunningClock
from tests.daemon.supervision.house import DEADLINES, SETTINGS, House, house

pytestmark = pytest.mark.anyio
READY = ActorReady("executor-1", 1, limits=ExecutorLimits(1, 63, 64))


class StillProcess:
    """A process that does nothing, until it is killed."""

    pid = 1

    def __init__(self) -> None:
        self.alive = True
        self.killed = anyio.Event()

    @classmethod
    async def start(cls, _config: HostConfig) -> StillProcess:
        return cls()

    async def wait(self) -> str:
        await self.killed.wait()
        return "it was ended by SIGKILL"

    def kill(self) -> None:
        self.alive = False
        self.killed.set()


class Clock:
    """A clock that the test moves; without it nothing passes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nobody tells when a loop has turned
        await anyio.sleep(0.001)


@asynccontextmanager
async def working(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[House]:
    monkeypatch.setattr(module, "ActorProcess", StillProcess)
    monkeypatch.setattr(module, "RunningClock", lambda most_s: RunningClock(most_s, clock))
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    async with house(folder, deadlines=DEADLINES) as made:
        made.supervisor._plan = made.supervisor._plan._replace(shutdown_s=0.0)
        await until(lambda: made.supervisor.pid is not None)
        to_supervisor: Sender[SupervisorMessage] = Sender(
            made.context, made.supervisor._addresses.supervisor, 10
        )
        with to_supervisor:
            to_supervisor.post(ActorHello("executor-1", 1))
            to_supervisor.post(READY)
            await made.wait_until(ready=True)
            yield made


async def pass_by(clock: Clock, made: House, seconds: float) -> None:
    """So much time, which the supervisor sees pass as it does on a machine that runs."""
    for _ in range(round(seconds)):
        clock.now += 1
        now = made.supervisor.health.now

        def turned(by: float = now) -> bool:
            return made.supervisor._turned >= by or not made.changes[-1]

        await until(turned)


async def test_an_executor_that_is_silent_is_replaced_and_the_supervisor_stays_well(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    async with working(short_folder, clock, monkeypatch) as made:
        await pass_by(clock, made, DEADLINES.progress_timeout_s - 2)
        assert made.changes == [True]
        assert is_well(made.supervisor.health)
        await pass_by(clock, made, 3)
        await made.wait_until(ready=False)
        assert is_well(made.supervisor.health)
        await until(lambda: bool(made.restarts))
        assert made.restarts == [f"it made no progress for {DEADLINES.progress_timeout_s:g} s"]


async def test_a_sleep_of_the_machine_is_no_silence_of_the_executor(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    async with working(short_folder, clock, monkeypatch) as made:
        clock.now += 3600
        assert is_well(made.supervisor.health), "the watchdog is fed at once"
        await pass_by(clock, made, 5)
        assert made.changes == [True]
        assert is_well(made.supervisor.health)


async def test_a_supervisor_that_waits_for_ever_is_not_well(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    async with working(short_folder, clock, monkeypatch) as made:
        # Nobody is left who would turn its loop.
        made.supervisor._wake = anyio.Event()
        monkeypatch.setattr(module, "_TICK_S", 3600.0)
        await anyio.sleep(0.05)
        for _ in range(12):
            clock.now += 1
            health = made.supervisor.health
        assert not is_well(health)
        made.supervisor._wake.set()


async def test_one_that_is_about_to_start_is_well(short_folder: Path) -> None:
    made = House(short_folder, SETTINGS, DEADLINES)
    assert is_well(made.supervisor.health)
    # Nobody has run it.
    made.supervisor._inbox.close()
    await made.end_scheduler()
    made.close()
