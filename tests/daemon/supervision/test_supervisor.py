from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
import structlog

from hearth.actors.mailbox import Receiver
from hearth.actors.messages import ExecutorControl, SetLogLevel
from hearth.actors.roles import HostConfig
from hearth.actors.settings import LogSettings
from hearth.daemon.configuration.settings import settings_of
from hearth.daemon.supervision.restart_policy import SupervisionSettings
from hearth.daemon.supervision.supervisor import ActorProcess
from hearth.runtime.errors import HearthError
from tests.daemon.supervision.harness import DEADLINES, SETTINGS, Harness, harness

pytestmark = pytest.mark.slow


def is_alive(pid: int) -> bool:
    """Whether the process exists, be it as a zombie."""
    return Path(f"/proc/{pid}").exists()


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name != "engine"]


async def test_a_killed_executor_fails_what_it_held_and_comes_back(short_folder: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with harness(short_folder) as made:
            await made.wait_until(ready=True)
            first = made.pid
            for rid in range(8):
                made.submit(rid, 1000)
            await made.until_running(7)
            made.submit(100, 5)
            await anyio.sleep(0.05)
            os.kill(first, signal.SIGKILL)
            killed = time.monotonic()
            ends = await made.until_ended(*range(8))
            assert time.monotonic() - killed < DEADLINES.progress_timeout_s
            assert set(ends.values()) == {"executor_failed"}
            assert await made.until_ended(100) == {100: "length"}
            made.submit(200, 5)
            assert await made.until_ended(200) == {200: "length"}
            assert made.changes == [True, False, True]
            assert made.restarts == ["it was ended by SIGKILL"]
            stages = [stage for stage, _ in made.loading]
            assert stages.count("answering") == 2
            second = made.pid
            assert second != first
            assert not is_alive(first)
        assert not is_alive(second)
    assert [line["reason"] for line in logs if line["event"] == "actor lost"] == [
        "it was ended by SIGKILL"
    ]


async def test_another_executor_takes_over_once_the_rows_that_run_have_ended(
    short_folder: Path,
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with harness(short_folder) as made:
            await made.wait_until(ready=True)
            first = made.pid
            for rid in range(8):
                made.submit(rid, 60)
            await made.until_running(7)
            assert made.supervisor.renew("other weights are to be served")
            made.scheduler.retire_executor()
            made.submit(100, 5)
            ends = await made.until_ended(*range(8), 100)
            assert ends == dict.fromkeys([*range(8), 100], "length")
            assert made.changes == [True, False, True]
            assert made.restarts == ["other weights are to be served"]
            assert made.pid != first
            assert not is_alive(first)
    assert [line["event"] for line in logs if line["log_level"] == "error"] == []


async def test_a_request_that_kills_the_executor_each_time_is_refused_by_name(
    short_folder: Path,
) -> None:
    with structlog.testing.capture_logs():
        async with harness(short_folder) as made:
            for rid in (1, 2):
                await made.wait_until(ready=True)
                made.submit(rid, 1000)
                await made.until_running(rid)
                os.kill(made.pid, signal.SIGKILL)
                assert await made.until_ended(rid) == {rid: "executor_failed"}
                await made.wait_until(ready=False)
            made.submit(3, 1000)
            assert await made.until_ended(3) == {3: "repeated_failure"}
            made.submit(4, 5)
            assert await made.until_ended(4) == {4: "length"}
            assert made.supervisor.restarts == 2


async def test_what_the_executor_measures_is_passed_on(short_folder: Path) -> None:
    async with harness(short_folder) as made:
        await made.wait_until(ready=True)
        made.submit(1, 20)
        await made.until_ended(1)
        assert (made.supervisor.restarts, made.supervisor.silent_s is None) == (0, False)
        await made.wait_for_metrics(lambda metrics: metrics.generation.tokens >= 19)
    assert made.metrics[-1].prefill.tokens >= 3
    assert made.metrics[-1].speculation.rounds == 0


async def test_a_hung_executor_is_killed_and_replaced(short_folder: Path) -> None:
    deadlines = SupervisionSettings(
        hello_s=20, load_timeout_s=20, progress_timeout_s=2.5, pause_s=0.05
    )
    with structlog.testing.capture_logs():
        async with harness(short_folder, deadlines=deadlines) as made:
            pid = await made.freeze_executor(tokens=1000)
            stopped = time.monotonic()
            assert await made.until_ended(1) == {1: "executor_failed"}
            assert time.monotonic() - stopped > 1.0
            made.submit(2, 3)
            assert await made.until_ended(2) == {2: "length"}
            assert not is_alive(pid)


async def test_an_executor_that_stood_still_together_with_the_daemon_is_kept(
    short_folder: Path,
) -> None:
    deadlines = SupervisionSettings(
        hello_s=20, load_timeout_s=20, progress_timeout_s=2.5, pause_s=0.05
    )
    async with harness(short_folder, deadlines=deadlines) as made:
        pid = await made.freeze_executor(tokens=100)
        time.sleep(3.5)  # noqa: ASYNC251 - the loop is to stand still
        os.kill(pid, signal.SIGCONT)
        assert await made.until_ended(1) == {1: "length"}
        assert made.changes == [True]


async def test_a_stop_leaves_no_process_and_no_file(short_folder: Path) -> None:
    async with harness(short_folder) as made:
        await made.wait_until(ready=True)
        pid = made.pid
        made.submit(1, 1000)
        await made.until_running(1)
        await made.supervisor.stop()
        assert await made.until_ended(1) == {1: "shutting_down"}
    assert not is_alive(pid)
    assert not left_over(short_folder)


async def test_a_hung_executor_does_not_keep_the_daemon(short_folder: Path) -> None:
    async with harness(short_folder) as made:
        await made.wait_until(ready=True)
        pid = made.pid
        os.kill(pid, signal.SIGSTOP)
    assert not is_alive(pid)
    assert not left_over(short_folder)


async def test_an_executor_that_keeps_dying_ends_the_daemon(short_folder: Path) -> None:
    settings = settings_of(engine_kind="simulated", restart_limit=1)
    made = Harness(short_folder, settings, DEADLINES)
    failures: list[HearthError] = []

    async def supervise(tasks: anyio.abc.TaskGroup) -> None:
        try:
            await made.supervisor.run()
        except HearthError as error:
            failures.append(error)
        tasks.cancel_scope.cancel()

    with structlog.testing.capture_logs(), anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.scheduler.run)
            tasks.start_soon(supervise, tasks)
            for _ in range(2):
                await made.wait_until(ready=True)
                os.kill(made.pid, signal.SIGKILL)
                await made.wait_until(ready=False)
            await anyio.sleep_forever()
    made.close()
    assert failures[0].code == "executor_failed"
    assert failures[0].message == (
        "the executor was lost, 1 restarts did not help: it was ended by SIGKILL"
    )


async def test_an_engine_that_cannot_load_ends_the_daemon_with_its_reason(
    short_folder: Path,
) -> None:
    (short_folder / "engine").mkdir()
    made = Harness(short_folder, SETTINGS, DEADLINES)
    with anyio.fail_after(30), pytest.raises(HearthError) as caught:
        await made.supervisor.run()
    await made.end_scheduler()
    made.close()
    assert caught.value.code == "engine_missing"


class FakeProcess:
    """A process that SIGKILL does not end, or that does not start."""

    alive, pid = True, 1

    async def wait(self) -> str:
        # Who shields a wait from all deadlines is to fail, not to hang.
        await anyio.sleep(30)
        raise AssertionError

    def kill(self) -> None:
        """As in the state D: nothing."""


async def test_a_process_that_cannot_be_killed_is_given_up(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(_config: HostConfig) -> FakeProcess:
        return FakeProcess()

    monkeypatch.setattr(ActorProcess, "start", start)
    made = Harness(short_folder, SETTINGS, SupervisionSettings(hello_s=0.1, kill_s=0.1))
    with structlog.testing.capture_logs(), anyio.fail_after(20):
        with pytest.raises(HearthError, match="does not end although it was killed") as caught:
            await made.supervisor.run()
        await made.end_scheduler()
    made.close()
    assert caught.value.code == "executor_stuck"


async def test_a_plan_that_comes_while_the_process_starts_is_told(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(config: HostConfig) -> FakeProcess:
        assert config.logs.log_level == "error"
        made.supervisor.adopt(made.supervisor._plan._replace(logs=LogSettings(log_level="debug")))
        endpoints.append(config.addresses.control)
        started.set()
        return FakeProcess()

    async def hear() -> None:
        await started.wait()
        control: Receiver[ExecutorControl] = Receiver(made.context, endpoints, ExecutorControl, 10)
        with control:
            heard.append(await control.receive())
        scope.cancel()

    started, endpoints, heard = anyio.Event(), list[str](), list[ExecutorControl]()
    monkeypatch.setattr(ActorProcess, "start", start)
    made = Harness(short_folder, SETTINGS, SupervisionSettings(kill_s=0.1))
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hear)
            with pytest.raises(HearthError), anyio.CancelScope() as scope:
                await made.supervisor.run()
        await made.end_scheduler()
    made.close()
    assert heard == [SetLogLevel("debug")]


async def test_a_stop_does_not_wait_for_a_process_that_cannot_be_killed(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(_config: HostConfig) -> FakeProcess:
        return FakeProcess()

    monkeypatch.setattr(ActorProcess, "start", start)
    made = Harness(short_folder, SETTINGS, SupervisionSettings(kill_s=0.1))
    with anyio.fail_after(20):
        with pytest.raises(HearthError) as caught, anyio.move_on_after(0.1):
            await made.supervisor.run()
        await made.end_scheduler()
    made.close()
    assert caught.value.code == "executor_stuck"


async def test_a_process_that_does_not_start_is_told_and_counts_as_a_restart(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ActorProcess.start

    async def start(config: HostConfig) -> ActorProcess:
        how = failures.pop()
        if how == "no memory":
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        process = await real(config)
        if how == "killed":
            process.kill()
        return process

    failures = ["", "killed", "no memory"]
    monkeypatch.setattr(ActorProcess, "start", start)
    with structlog.testing.capture_logs() as logs:
        async with harness(short_folder) as made:
            await made.wait_until(ready=True)
    reasons = [line["reason"] for line in logs if line["event"] == "actor not started"]
    assert reasons == [
        "its process could not be started (Cannot allocate memory)",
        "it was ended by SIGKILL",
    ]
