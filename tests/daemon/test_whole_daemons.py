"""Whole daemons: over TCP, under a service manager, in both modes, beside a clock that jumps."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner

from hearth.daemon.cli.status import status
from hearth.daemon.configuration.settings import settings_of
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Metrics, MetricsText, Reload, Reloaded
from hearth.daemon.door.keys import add_client, make_server_keys, remove_client
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.daemon.service import serve
from hearth.runtime.errors import HearthError
from hearth_client import Client, DeadlineExceeded, NotAllowed
from tests.daemon.manager import Manager


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port: int = unused.getsockname()[1]
    return port


def test_keys_are_added_and_removed_while_a_daemon_serves(
    tiny_engine: Path, short_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, robot, arm = short_folder / "keys", short_folder / "robot", short_folder / "arm"
    make_server_keys(keys)
    add_client(keys, "robot", hand_over=robot)
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    flags = ["--engine-kind", "simulated", "--step-ms", "100"]
    flags += ["--tcp-port", str(port), "--keys", str(keys)]

    with own_daemon(tiny_engine, flags) as daemon, Client(daemon.socket) as local:

        def reload() -> Reloaded:
            return ask(Reload(), Reloaded, str(daemon.socket))

        shown = CliRunner().invoke(status, ["--socket", address, "--key", str(robot)])
        assert "ready" in shown.output
        assert reload() == Reloaded([], [])

        add_client(keys, "arm", hand_over=arm)
        with pytest.raises(NotAllowed):
            Client(address, client_key=arm).connect()
        assert reload() == Reloaded(["keys"], [])
        with Client(address, client_key=arm) as client, Client(address, client_key=robot) as other:
            ended = client.generate("a", max_tokens=80)
            replies = [one.generate("a", max_tokens=5) for one in (local, other)]
            for one in (ended, *replies):
                next(iter(one))
            remove_client(keys, "arm")
            assert reload() == Reloaded(["keys"], [])
            with pytest.raises(NotAllowed, match="not listed any more"):
                ended.text()
            for one in replies:
                one.text()
                assert one.done is not None
                assert one.done.usage.completion_tokens == 5
            with pytest.raises(NotAllowed, match="does not list this key"):
                client.status()

        (keys / "server.key_secret").chmod(0o644)
        with pytest.raises(HearthError, match=r"mode 0644.*chmod 600"):
            reload()
        (keys / "server.key_secret").chmod(0o600)
        text = ask(Metrics(), MetricsText, str(daemon.socket)).text
        refused = next(line for line in text.splitlines() if 'code="not_allowed"' in line)
        assert float(refused.split()[-1]) >= 1

        second = settings_of(
            socket=str(short_folder / "2"), tcp_port=port, keys=str(keys), log_format="json"
        )
        assert serve(second, tiny_engine) == 78
        structlog.reset_defaults()
        assert f"cannot listen on port {port} of 127.0.0.1" in capsys.readouterr().err
        assert local.status().state == "ready"
        log = daemon.log()
    assert f'"tcp":"127.0.0.1:{port}"' in log
    assert '"client":"arm"' in log
    assert "refused by TCP: keys that are not listed" in log


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


# Four prompts of 60 tokens take 1 s to read, and 20 steps more until they have paid for that.
DEAR = (
    *("--engine-kind", "simulated", "--step-ms", "50", "--prefill-us", "4000"),
    *("--hold-s", "0.15", "--speculation", "off", "--prefix-cache-bytes", "0"),
)


SLOW = ("--engine-kind", "simulated", "--step-ms", "20", "--hold-s", "60")


@pytest.mark.parametrize("batching", ["joining", "synchronous"])
def test_a_short_reply_joins_a_long_one_or_waits_for_its_end(
    tiny_engine: Path, batching: str
) -> None:
    flags = (*SLOW, "--batching", batching)
    with own_daemon(tiny_engine, flags) as daemon, Client(daemon.socket) as client:
        long = client.generate("a", max_tokens=60, ignore_eos=True, timestamps=True)
        deltas = iter(long)
        first = next(deltas)
        report = client.status()
        short = client.generate("b", max_tokens=3, ignore_eos=True, timestamps=True)
        began = next(iter(short)).ended
        ended = [delta.ended for delta in deltas][-1]
        short.text()
    assert (report.running, report.places) == (1, 4)
    assert first.ended is not None
    assert began is not None
    assert ended is not None
    assert (began < ended) is (batching == "joining")
    assert short.done is not None
    waited = short.done.usage.queue_ms / 1000
    # Until the border that follows, or for the end of the other.
    assert (waited < (ended - first.ended) / 2) is (batching == "joining")
    assert short.done.usage.prefill_ms >= 20


@pytest.mark.parametrize("batching", ["joining", "synchronous"])
def test_a_client_that_floods_with_long_prompts_does_not_hold_up_another(
    tiny_engine: Path, batching: str
) -> None:
    flags = (*DEAR, "--batching", batching)
    with (
        own_daemon(tiny_engine, flags) as daemon,
        Client(daemon.socket) as flooding,
        Client(daemon.socket) as other,
    ):
        asked = {"max_tokens": 30, "ignore_eos": True, "timestamps": True}
        flood = [flooding.generate(60 * "a", **asked) for _ in range(10)]  # type: ignore[arg-type]  # options
        while flooding.status().running < 4:
            time.sleep(0.01)
        first = next(iter(other.generate("b", max_tokens=1, ignore_eos=True, timestamps=True)))
        flooding.status()
        before = [
            delta.ended is not None and first.ended is not None and delta.ended < first.ended
            for one in flood
            for delta in one._exchange.deltas
        ]
    # It waits 1.5 s, of which four prompts take 1: not for the twenty tokens that pay for those.
    assert sum(before) < 4 * 15


LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


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


@pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed")
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
