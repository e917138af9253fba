"""A whole daemon under a service manager that is played by the test."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from hearth.daemon.configuration.settings import settings_of
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Reload, Reloaded
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.daemon.service import serve
from hearth.runtime.errors import HearthError
from hearth_client import Client
from tests.daemon.manager import Manager

SIMULATED = ("--engine-kind", "simulated", "--step-ms", "20")


@contextmanager
def daemon_with(engine: Path, settings: Path) -> Iterator[OwnDaemon]:
    with own_daemon(engine, [*SIMULATED, "--config", str(settings)]) as daemon:
        yield daemon


def reload(daemon: OwnDaemon) -> Reloaded:
    return ask(Reload(), Reloaded, str(daemon.socket))


def test_a_service_from_start_to_end_with_reloads_that_lose_no_request(
    tiny_engine: Path, manager: Manager, short_folder: Path
) -> None:
    file = short_folder / "hearth.toml"
    file.write_text("requests_per_client = 4")
    with daemon_with(tiny_engine, file) as daemon:
        start = manager.until("READY=1")
        states = [line for line in start if line.startswith("STATUS=")]
        assert states[-1] == "STATUS=ready"
        assert "STATUS=loading: opening" in states
        assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in start)
        assert manager.until("WATCHDOG=1")[-1] == "WATCHDOG=1"
        with Client(daemon.socket) as client:
            reply = client.generate("a", max_tokens=40)
            next(iter(reply))

            file.write_text('requests_per_client = 2\nlog_level = "debug"\nmax_batch = 3')
            assert reload(daemon) == Reloaded(["requests_per_client", "log_level"], ["max_batch"])
            told = manager.until("RELOADING=1")
            assert "READY=1" not in told
            manager.until("READY=1")

            file.write_text("requests_per_client = 0")
            with pytest.raises(HearthError) as refused:
                reload(daemon)
            assert refused.value.field == "requests_per_client"
            assert f"{file}, requests_per_client: 0 is not allowed" in refused.value.message
            manager.until("READY=1")

            # What a start would refuse, as this engine has no threads.
            file.write_text("threads = 3")
            with pytest.raises(HearthError) as refused:
                reload(daemon)
            assert refused.value.field == "threads"
            manager.until("READY=1")

            file.write_text("")
            os.kill(daemon.pid, signal.SIGHUP)
            manager.until("RELOADING=1")
            manager.until("READY=1")
            reply.text()
            assert reply.done is not None
            assert reply.done.usage.completion_tokens == 40
        daemon.stop()
        manager.until("STOPPING=1")
        manager.until("STATUS=draining (SIGTERM)")
        log = daemon.log()
    assert '"event":"not reloaded"' in log
    assert log.count('"event":"reloaded"') == 2


def test_the_reason_of_a_failure_is_the_last_that_the_manager_shows(
    manager: Manager, tmp_path: Path
) -> None:
    assert serve(settings_of(log_format="json"), tmp_path / "none") == 78
    structlog.reset_defaults()
    manager.close()
    (*_, last, _end) = manager.until("end")
    assert last.startswith("STATUS=failed (")
    assert str(tmp_path / "none") in last
