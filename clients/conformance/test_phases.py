"""Cancel, leases, slow readers and a restart, in the middle of real replies."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.conformance.conftest import SIMULATED, Drive
from clients.conformance.driving import Driver, Event
from hearth.daemon.own_daemon import OwnDaemon
from hearth.daemon.shipped import engine_folder
from hearth_client import Client as Reference
from hearth_client import Generation

LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}
CLOCK: dict[str, Any] = {"max_tokens": 350, "ignore_eos": True, "priority": 10}
"""A reply of a second and three quarters at least, by which a scene lets time pass."""


@pytest.fixture
def driver(drive: Drive, slow: OwnDaemon) -> Driver:
    """A driver that is connected to the daemon with slow steps."""
    started = drive(slow.socket)
    started.connect()
    return started


@pytest.fixture
def reference(slow: OwnDaemon) -> Iterator[Reference]:
    """Another client of the same daemon."""
    with Reference(slow.socket) as client:
        yield client


@pytest.fixture
def busy(reference: Reference) -> Iterator[None]:
    """Both places of the daemon are taken."""
    taken: list[Generation] = [reference.generate(**LONG, priority=10) for _ in range(2)]
    for one in taken:
        next(one)
    yield
    for one in taken:
        one.cancel()
        one.text()


def cancelled(driver: Driver, name: str) -> Event:
    """Check that a request has ended by its cancel; returns the end."""
    end = driver.answered(name).end
    assert (end["event"], end.get("reason")) == ("done", "cancelled"), end
    return end


@pytest.mark.usefixtures("busy")
def test_cancel_in_the_queue(driver: Driver) -> None:
    driver.generate("a", prompt="a", max_tokens=8)
    driver.do("status", "s")
    assert driver.answered("s").end["running"] == 2
    driver.do("cancel", "a")
    assert cancelled(driver, "a")["usage"]["completion_tokens"] == 0


def test_cancel_at_once(driver: Driver) -> None:
    driver.generate("a", **LONG)
    driver.do("cancel", "a")
    cancelled(driver, "a")


def test_cancel_in_the_stream_leaves_others_alone(driver: Driver) -> None:
    driver.generate("a", **LONG)
    driver.generate("b", prompt="b", max_tokens=60, ignore_eos=True)
    driver.expect("delta", "a")
    driver.do("cancel", "a")
    assert cancelled(driver, "a")["usage"]["completion_tokens"] >= 1
    answered = driver.answered("b")
    assert (answered.end["reason"], len(answered.tokens())) == ("length", 60)


def test_cancel_after_the_end_and_twice(driver: Driver) -> None:
    driver.generate("a", **LONG)
    driver.expect("accepted", "a")
    driver.do("cancel", "a")
    driver.do("cancel", "a")
    cancelled(driver, "a")
    driver.do("cancel", "a")
    answered = driver.ask("b", prompt="b", max_tokens=4, ignore_eos=True)
    assert answered.end["reason"] == "length"
    assert driver.unread("a") == []


def pass_time(reference: Reference) -> None:
    """Wait for a reply of somebody else, longer than a lease of a second."""
    reference.generate("clock", **CLOCK).text()


def test_the_lease_is_kept_through_a_long_stream(drive: Drive, slow: OwnDaemon) -> None:
    driver = drive(slow.socket)
    assert driver.connect(lease_s=1)["limits"]["lease_s"] == 1
    answered = driver.ask("a", prompt="a", **CLOCK)
    assert (answered.end["reason"], len(answered.tokens())) == ("length", 350)


@pytest.mark.parametrize("stream", ["unread", "none"])
def test_the_lease_is_kept_while_the_program_reads_nothing(
    drive: Drive, slow: OwnDaemon, reference: Reference, stream: str
) -> None:
    driver = drive(slow.socket)
    driver.connect(lease_s=1)
    if stream == "unread":
        driver.generate("a", prompt="a", read=False, **CLOCK)
    pass_time(reference)
    if stream == "unread":
        driver.do("read", "a")
        answered = driver.answered("a")
        assert answered.end.get("reason") == "length", answered.end
        assert len(answered.tokens()) == 350
    driver.do("status", "s")
    assert driver.answered("s").end["state"] == "ready"
    # Nothing was opened anew meanwhile.
    assert driver.ask("b", prompt="b", max_tokens=2, ignore_eos=True).end["reason"] == "length"


def test_a_slow_reader_gets_all_or_is_told(driver: Driver) -> None:
    driver.generate("a", prompt="a", max_tokens=400, ignore_eos=True, read=False)
    answered = driver.ask("b", prompt="b", max_tokens=400, ignore_eos=True)
    assert len(answered.tokens()) == 400
    driver.do("read", "a")
    late = driver.answered("a")
    if late.end["event"] == "done":
        assert (late.end["reason"], len(late.tokens())) == ("length", 400)
    else:
        assert (late.end["code"], late.end["kind"]) == ("slow_client", "service")


def test_an_unread_stream_can_be_cancelled(driver: Driver) -> None:
    driver.generate("a", read=False, **LONG)
    driver.ask("b", prompt="b", max_tokens=4, ignore_eos=True)
    driver.do("cancel", "a")
    driver.do("read", "a")
    cancelled(driver, "a")


def test_close_with_open_requests(driver: Driver, reference: Reference) -> None:
    driver.generate("a", **LONG)
    driver.generate("b", **LONG)
    driver.expect("delta", "a")
    told = driver.close()
    ends = {one["as"]: (one["code"]) for one in told if one["event"] == "failed"}
    assert ends == {"a": "client_closed", "b": "client_closed"}
    # The daemon has ended them too.
    reference.generate("a", max_tokens=1).text()
    assert reference.status().running == 0


def started(folder: Path) -> OwnDaemon:
    """A daemon that ends its replies a moment after it was told to stop."""
    daemon = OwnDaemon(folder, engine_folder(""), [*SIMULATED, "--drain-s", "0.1", "--no-verify"])
    daemon.wait_until_ready()
    return daemon


def test_a_daemon_that_dies_is_restarted_and_stops(drive: Drive, short_folder: Path) -> None:
    daemon = started(short_folder)
    try:
        driver = drive(daemon.socket)
        epoch = driver.connect()["epoch"]
        driver.generate("a", **LONG)
        driver.generate("b", **LONG, read=False)
        driver.expect("delta", "a")
        daemon.kill()
        driver.do("read", "b")
        for name in "ab":
            failed = driver.answered(name).end
            assert (failed["code"], failed["kind"]) == ("connection_lost", "connection")
        daemon = started(short_folder)
        assert driver.connect(timeout_s=20)["epoch"] != epoch
        driver.generate("c", **LONG)
        driver.expect("delta", "c")
        os.kill(daemon.pid, signal.SIGTERM)
        failed = driver.answered("c").end
        assert (failed["code"], failed["kind"]) == ("shutting_down", "service")
        assert daemon.wait(Driver.patience_s) == 0
        driver.do("connect")
        failed = driver.expect("failed")
        assert (failed["code"], failed["kind"]) == ("connection_refused", "connection")
    finally:
        daemon.kill()
