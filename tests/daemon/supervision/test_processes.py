"""Processes of actors, deadlines on a machine that slept, and files that are watched."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
import structlog

from hearth.actors.addresses import SocketFolder
from hearth.actors.arena import Arena
from hearth.actors.mailbox import Sender
from hearth.actors.messages import ExecutorLimits
from hearth.actors.roles import HostConfig
from hearth.actors.supervisor_messages import ActorFailed, ActorHello, ActorReady, SupervisorMessage
from hearth.daemon.supervision import supervisor as module
from hearth.daemon.supervision.file_watch import STILL_S, FileWatch, InPlace, Mark, WatchedFile
from hearth.daemon.supervision.supervisor import ActorProcess
from hearth.daemon.watchdog import is_well
from hearth_client.running_clock import RunningClock
from tests.daemon.supervision.harness import DEADLINES, SETTINGS, Harness, harness

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
) -> AsyncIterator[Harness]:
    monkeypatch.setattr(module, "ActorProcess", StillProcess)
    monkeypatch.setattr(module, "RunningClock", lambda most_s: RunningClock(most_s, clock))
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    async with harness(folder, deadlines=DEADLINES) as made:
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


async def pass_by(clock: Clock, made: Harness, seconds: float) -> None:
    """So much time, which the supervisor sees pass as it does on a machine that runs."""
    for _ in range(round(seconds)):
        clock.now += 1
        now = made.supervisor.health.now

        def turned(by: float = now) -> bool:
            return made.supervisor._turned >= by or not made.changes[-1]

        await until(turned)


@pytest.mark.anyio
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


@pytest.mark.anyio
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


@pytest.mark.anyio
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


@pytest.mark.anyio
async def test_one_that_is_about_to_start_is_well(short_folder: Path) -> None:
    made = Harness(short_folder, SETTINGS, DEADLINES)
    assert is_well(made.supervisor.health)
    # Nobody has run it.
    made.supervisor._inbox.close()
    await made.end_scheduler()
    made.close()


async def test_a_failure_that_an_executor_has_told_is_logged_once(short_folder: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with harness(short_folder) as made:
            await made.wait_until(ready=True)
            inbox = SocketFolder(short_folder).supervisor("executor")
            words: Sender[SupervisorMessage] = Sender(made.context, inbox, 10)
            with words:
                words.post(ActorFailed("executor-1", "device_lost", "the GPU is gone"))
                await made.supervisor._failure_reported.wait()
            os.kill(made.pid, signal.SIGKILL)
            await made.wait_until(ready=False)
            await made.wait_until(ready=True)
    errors = [(line["event"], line["reason"]) for line in logs if line["log_level"] == "error"]
    assert errors == [("actor failed", "the GPU is gone")]


COUNT_ARENAS = """
import os, pathlib, sys
found = [one for one in pathlib.Path("/proc/self/fd").iterdir() if os.path.islink(one)]
sys.exit(40 + sum("hearth-" in os.readlink(one) for one in found))
"""


async def ended(code: str) -> str:
    process = ActorProcess(await anyio.open_process([sys.executable, "-c", code]))
    return await process.wait()


async def test_an_end_is_told_by_status_or_signal() -> None:
    with anyio.fail_after(30):
        assert await ended("raise SystemExit(3)") == "it ended with status 3"
        assert await ended("import os; os.kill(os.getpid(), 9)") == "it was ended by SIGKILL"


async def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    number = 40
    assert number not in {member.value for member in signal.Signals}
    with anyio.fail_after(30):
        code = f"import os; os.kill(os.getpid(), {number})"
        assert await ended(code) == f"it was ended by signal {number}"


async def test_a_process_starts_from_our_code_wherever_the_daemon_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hearth"
    folder.mkdir()
    folder.joinpath("__init__.py").write_text("raise SystemExit(3)")
    # Who is not its parent ends it at once, with a status of the host's own.
    config = HostConfig(
        name="executor-1",
        role="executor",
        settings=msgspec.Raw(b"{}"),
        addresses=SocketFolder(tmp_path).addresses("executor", 1),
        parent=os.getppid(),
    )
    with anyio.fail_after(30):
        for gone in (False, True):
            (tmp_path / "gone").mkdir()
            monkeypatch.chdir(tmp_path / "gone" if gone else tmp_path)
            (tmp_path / "gone").rmdir()
            process = await ActorProcess.start(config)
            assert await process.wait() == "it ended with status 1"


async def test_a_process_inherits_what_its_configuration_names_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = tmp_path / "hearth" / "actors"
    actors.mkdir(parents=True)
    (actors.parent / "__init__.py").touch()
    host = actors / "host.py"
    host.write_text(COUNT_ARENAS)
    monkeypatch.setattr("hearth.daemon.supervision.supervisor._SOURCE", tmp_path)
    one, other = Arena.create("one", 64), Arena.create("other", 64)
    config = HostConfig(
        name="encoder-1",
        role="encoder",
        settings=msgspec.Raw(b"{}"),
        addresses=SocketFolder(tmp_path).addresses("encoder", 1),
        parent=os.getpid(),
        descriptors=(one.descriptor,),
    )
    with anyio.fail_after(30):
        process = await ActorProcess.start(config)
        assert await process.wait() == "it ended with status 41"
    for arena in (one, other):
        arena.close()


FILES = (WatchedFile("weights"), WatchedFile("answer.json", mapped=False))
WHOLE = Mark(1, 10, 100, 5, 5)
OTHER = Mark(1, 11, 100, 9, 9)


def marks(weights: Mark | None = WHOLE, answer: Mark | None = WHOLE) -> dict[str, Mark | None]:
    return {"weights": weights, "answer.json": answer}


def watch(at: float = 0.0) -> FileWatch:
    made = FileWatch()
    made.began(FILES, marks(), at)
    return made


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        (WHOLE, None),
        (WHOLE._replace(changed_ns=9), None),
        (WHOLE._replace(modified_ns=9), InPlace("weights", cut=False)),
        (WHOLE._replace(size=200), InPlace("weights", cut=False)),
        (WHOLE._replace(size=99), InPlace("weights", cut=True)),
        (OTHER, None),
        (OTHER._replace(device=2, inode=10), None),
        (None, None),
    ],
    ids=["as it was", "touched by chmod", "written", "longer", "cut", "mv", "mount", "removed"],
)
def test_a_file_is_changed_in_place_where_the_path_leads_to_what_was_mapped(
    weights: Mark | None, found: InPlace | None
) -> None:
    assert watch().look(marks(weights), 1.0) == found


def test_what_is_read_once_may_change() -> None:
    made = watch()
    assert made.look(marks(answer=WHOLE._replace(size=1)), 1.0) is None
    assert made.differing(marks(answer=WHOLE._replace(size=1))) == ["answer.json"]


def test_files_are_read_again_once_they_have_been_at_rest_for_long_enough() -> None:
    made = watch()
    for second in range(1, 5):
        made.look(marks(WHOLE._replace(modified_ns=10 + second)), float(second))
        assert not made.may_start(second + STILL_S - 0.1)
    assert made.may_start(4 + STILL_S)


def test_files_as_they_were_are_tried_again_late() -> None:
    made = watch()
    made.look(marks(), 10.0)
    assert not made.may_start(10.0)
    assert made.may_start(60.0)


def test_other_files_are_told_from_those_that_worked() -> None:
    made = watch()
    assert not made.are_others()
    made.worked()
    made.began(FILES, marks(WHOLE._replace(changed_ns=9)), 1.0)
    assert not made.are_others()
    made.began(FILES, marks(OTHER), 2.0)
    assert made.are_others()
    assert made.differing(marks(OTHER)) == []
    assert made.differing(marks()) == ["weights"]
