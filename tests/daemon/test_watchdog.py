import math
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import sleep

import anyio
import pytest
import structlog

from hearth.daemon import watchdog as module
from hearth.daemon.signals import SignalRequests, held_signals
from hearth.daemon.watchdog import LoopHealth, Watchdog, is_well, notify, watched_s, worst
from hearth.runtime.errors import HearthError

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


@pytest.fixture
def manager(short_folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(short_folder / "notify"))
        listening.settimeout(2)
        yield listening


def test_the_manager_hears_the_message(manager: socket.socket) -> None:
    notify("READY=1", {"NOTIFY_SOCKET": manager.getsockname()})
    assert manager.recv(100) == b"READY=1"


def test_an_abstract_socket_begins_with_a_zero_byte() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0hearth-{id(listening)}")
        listening.settimeout(2)
        notify("STOPPING=1", {"NOTIFY_SOCKET": f"@hearth-{id(listening)}"})
        assert listening.recv(100) == b"STOPPING=1"


def test_a_manager_that_is_behind_is_waited_for_and_not_for_long(manager: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": manager.getsockname()}
    manager.settimeout(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        with suppress(BlockingIOError):
            # As many as the kernel keeps.
            while True:
                other.sendto(b"WATCHDOG=1", manager.getsockname())
    notify("READY=1", environ, patience_s=0.01)

    def read_later() -> None:
        sleep(0.05)
        manager.recv(100)

    reader = Thread(target=read_later)
    reader.start()
    notify("READY=1", environ, patience_s=20)
    reader.join()
    heard = []
    with suppress(BlockingIOError):
        while True:
            heard.append(manager.recv(100))
    assert heard[-1] == b"READY=1"
    assert heard.count(b"READY=1") == 1


def test_without_a_manager_nothing_happens(short_folder: Path) -> None:
    notify("READY=1", {})
    notify("READY=1", {"NOTIFY_SOCKET": str(short_folder / "gone")})


MANAGED = {"NOTIFY_SOCKET": "/run/systemd/notify"}


async def received(*numbers: signal.Signals) -> AsyncIterator[signal.Signals]:
    for number in numbers:
        yield number


async def never() -> None:
    pytest.fail("nobody asked for it")


def test_a_terminal_that_closes_asks_for_a_stop_unless_it_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _number: signal.SIG_DFL)
    assert signal.SIGHUP in SignalRequests({}).signals
    monkeypatch.setattr(signal, "getsignal", lambda _number: signal.SIG_IGN)
    assert SignalRequests({}).signals == [signal.SIGTERM, signal.SIGINT]
    assert signal.SIGHUP in SignalRequests(MANAGED).signals


def test_a_hangup_before_there_is_something_to_reload_ends_nothing_under_a_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ignored: list[tuple[int, object]] = []
    monkeypatch.setattr(signal, "signal", lambda number, act: ignored.append((number, act)))
    SignalRequests({}).nothing_to_reload()
    assert ignored == []
    SignalRequests(MANAGED).nothing_to_reload()
    assert ignored == [(signal.SIGHUP, signal.SIG_IGN)]


@pytest.mark.anyio
async def test_at_a_terminal_each_signal_asks_for_a_stop() -> None:
    asked = SignalRequests({})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        assert await asked.stop(received(number), never) is number


@pytest.mark.anyio
async def test_under_a_manager_a_hangup_reloads_and_is_no_stop() -> None:
    calls: list[None] = []

    async def refused() -> None:
        calls.append(None)
        raise HearthError("invalid_value", "the file is wrong")

    signals = received(signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    asked = SignalRequests(MANAGED)
    assert await asked.stop(signals, refused) is signal.SIGTERM
    assert len(calls) == 2
    assert await asked.stop(signals) is signal.SIGINT


@pytest.mark.anyio
async def test_a_fault_in_a_reload_ends_nothing() -> None:
    async def faulty() -> None:
        raise OSError("the disk is gone")

    with structlog.testing.capture_logs() as logs:
        stopped = await SignalRequests(MANAGED).stop(
            received(signal.SIGHUP, signal.SIGTERM), faulty
        )
    assert stopped is signal.SIGTERM
    assert [line["event"] for line in logs] == ["a reload failed"]


def test_signals_are_held_until_they_are_sent_again() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("it is held"))
    try:
        with held_signals() as send_again:
            signal.raise_signal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
            assert heard == []
            send_again()
            send_again()
        assert heard == [signal.SIGTERM]
        with held_signals():
            signal.raise_signal(signal.SIGTERM)
            assert len(heard) == 1
        assert len(heard) == 2, "who was there before hears it at the end"
    finally:
        signal.signal(signal.SIGTERM, before)
