"""What a jump of the wall clock does to a daemon: nothing but other times in its log."""

import json
import os
import signal
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from hearth.daemon.own_daemon import own_daemon
from hearth_client import Client, DeadlineExceeded
from tests.daemon.manager import Manager

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed")


@pytest.fixture
def jump(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says by how much the wall clock of new processes is off; others go on."""
    file = short_folder / "jump"
    file.write_text("+0")
    monkeypatch.setenv("LD_PRELOAD", str(LIBRARY))
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(file))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    return file


def test_leases_deadlines_and_the_watchdog_go_by_a_clock_that_does_not_jump(
    tiny_engine: Path, jump: Path, manager: Manager
) -> None:
    with own_daemon(tiny_engine) as daemon, Client(daemon.socket) as client:
        manager.until("READY=1")
        executor = daemon.executor
        assert executor is not None
        for offset in ("+1d", "-1d"):
            os.kill(executor, signal.SIGSTOP)
            reply = client.generate("a", max_tokens=40, deadline_s=600)
            late = client.generate("b", max_tokens=40, deadline_s=0.2)
            jump.write_text(offset)
            with pytest.raises(DeadlineExceeded):
                late.text()
            manager.forget()
            manager.until("WATCHDOG=1")
            os.kill(executor, signal.SIGCONT)
            reply.text()
            assert reply.done is not None
            assert reply.done.reason == "length"
        assert client.status().state == "ready"
        assert daemon.executor == executor
        log = [json.loads(line) for line in daemon.log().splitlines()]
    assert not [line for line in log if line["level"] == "error"]
    times = [datetime.fromisoformat(line["timestamp"].rstrip("Z")) for line in log]
    assert max(times) - times[0] > timedelta(hours=12)
    assert times[0] - min(times) > timedelta(hours=12)
