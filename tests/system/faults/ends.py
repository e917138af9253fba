"""Rows about starts, stops, signals and what the system has no more of."""

import os
import resource
import signal
import socket
import stat
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Metrics, MetricsText, Reload, Reloaded
from hearth.daemon.own_daemon import OwnDaemon
from hearth_client import Client
from hearth_client.errors import ConnectionFailed, ConnectionTimeout
from tests.system.faults.raw_peer import connection
from tests.system.faults.trial import NotRunError, Trial, most, seconds_since
from tests.system.faults.wire_client import PATIENCE_S, WireClient

PROMPT = "the lamp is on"
_DRAIN_S = 2.0
_REFUSED = 78
_FORCED = 130
_MANY = 60
_FILES = 1024
_SILENT = 600
_DAY_S = 86_400
_MOST_TRIES = 10
_FAKETIME = "faketime/libfaketime.so.1"


def terminated_under_load(trial: Trial) -> None:
    """SIGTERM while short and long replies stream; another request comes later."""
    with trial.daemon("--drain-s", str(_DRAIN_S)) as daemon, trial.client(daemon) as client:
        short = [client.generate(f"short {n}", max_tokens=40) for n in range(3)]
        long = client.generate("long", max_tokens=most(client))
        for one in (*short, long):
            client.wait_for_deltas(one)
        os.kill(daemon.pid, signal.SIGTERM)
        started = time.monotonic()
        client.wait_for_status(lambda status: status["state"] == "draining")
        trial.expect(
            "late_request",
            client.outcome(client.generate("late", max_tokens=4)),
            "shutting_down",
        )
        trial.expect("short_requests", {client.outcome(one) for one in short}, {"length"})
        # A real engine may be done with it by then.
        ends = ["shutting_down"] if trial.simulated else ["shutting_down", "length"]
        trial.one_of("long_request", client.outcome(long), ends)
        trial.expect("exit_code", daemon.wait(PATIENCE_S), 0)
        trial.at_most("ended_s", seconds_since(started), _DRAIN_S + 1)
        trial.expect("socket_left", daemon.socket.exists(), wanted=False)


def signalled(trial: Trial) -> None:
    """A reload by SIGHUP as of a service manager, SIGTERM twice, and SIGINT to another daemon."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as folder, ExitStack() as stack:
        manager = stack.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)))
        manager.bind(address := f"{folder}/notify")
        settings = Path(folder) / "hearth.toml"
        settings.write_text("requests_per_client = 4\n")
        flags = ("--config", str(settings), "--drain-s", "60")
        with trial.daemon(*flags, environ={"NOTIFY_SOCKET": address}) as daemon:
            with trial.client(daemon) as client:
                reply = client.generate(PROMPT, max_tokens=60)
                client.wait_for_deltas(reply)
                settings.write_text(f"requests_per_client = {_MANY + 2}\n")
                reloaded = ask(Reload(), Reloaded, str(daemon.socket))
                trial.expect("reloaded", reloaded.changed, ["requests_per_client"])
                os.kill(daemon.pid, signal.SIGHUP)
                trial.expect("request_beside_reloads", client.outcome(reply), "length")
                # A fast engine ends one reply before the second signal comes.
                long = [client.generate(PROMPT, max_tokens=most(client)) for _ in range(_MANY)]
                client.wait_for_deltas(long[0])
                os.kill(daemon.pid, signal.SIGTERM)
                client.wait_for_status(lambda status: status["state"] == "draining")
                os.kill(daemon.pid, signal.SIGTERM)
                started = time.monotonic()
                trial.expect("forced_request", client.outcome(long[-1]), "shutting_down")
            trial.expect("forced_exit_code", daemon.wait(PATIENCE_S), _FORCED)
            trial.at_most("forced_s", seconds_since(started), 10.0)
    with trial.daemon() as daemon, trial.client(daemon) as client:
        reply = client.generate(PROMPT, max_tokens=40)
        client.wait_for_deltas(reply)
        os.kill(daemon.pid, signal.SIGINT)
        trial.expect("interrupted_request", client.outcome(reply), "length")
        trial.expect("interrupted_exit_code", daemon.wait(PATIENCE_S), 0)


def second_start(trial: Trial) -> None:
    """Another daemon starts on the socket of one that serves."""
    first = trial.shared()
    with trial.client(first) as client, tempfile.TemporaryDirectory(prefix="hearth-") as folder:
        reply = client.generate(PROMPT, max_tokens=200)
        started = time.monotonic()
        with trial.begun(Path(folder), "--socket", str(first.socket)) as second:
            trial.expect("exit_code", second.wait(PATIENCE_S), 1)
            trial.measured["refused_s"] = seconds_since(started)
            named = f"process {first.pid} already serves" in second.log()
            trial.expect("names_the_first", named, wanted=True)
            trial.expect("traceback", "Traceback" in second.log(), wanted=False)
        trial.expect("request_of_the_first", client.outcome(reply), "length")


def wrong_places(trial: Trial) -> None:
    """A stale socket, a folder that is missing or takes nothing, and a path that is too long."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:
        folder = Path(name)
        stale = folder / "stale.sock"
        with closing(socket.socket(socket.AF_UNIX)) as left:
            left.bind(str(stale))
        missing = folder / "missing" / "hearth.sock"
        for what, path in (("stale_socket", stale), ("missing_folder", missing)):
            at = ("--socket", str(path))
            with trial.begun(folder, *at), closing(WireClient(path)) as client:
                trial.expect(what, client.ask("status")["t"], "status_report")
        mode = stat.S_IMODE(missing.parent.stat().st_mode)
        trial.expect("mode_of_the_folder", f"{mode:o}", "750")
        sealed = folder / "sealed"
        sealed.mkdir(mode=0o555)
        # To root every folder of a disk can be written to.
        nowhere = sealed if os.geteuid() else Path("/proc/hearth")
        places = {"read_only_folder": nowhere / "s", "path_too_long": folder / ("x" * 108)}
        for what, path in places.items():
            with trial.begun(folder, "--socket", str(path)) as daemon:
                trial.expect(what, daemon.wait(PATIENCE_S), _REFUSED)
                log = daemon.log()
                trial.expect(f"{what}_lines", len(log.splitlines()), 1)
                trial.expect(f"{what}_traceback", "Traceback" in log, wanted=False)


def clock_jumps(trial: Trial) -> None:
    """The clock of the wall jumps by a day and back while replies stream; needs libfaketime."""
    library = next((one for one in Path("/usr/lib").glob(f"*/{_FAKETIME}")), None)
    if library is None:
        raise NotRunError("libfaketime is not installed")
    with tempfile.TemporaryDirectory(prefix="hearth-") as folder:
        shift = Path(folder) / "shift"
        shift.write_text("+0")
        environ = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(shift),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }
        # Of no length: libfaketime's own sleep until a monotonic time refuses those of a daemon.
        steps = ("--step-ms", "0", "--prefill-us", "0") if trial.simulated else ()
        flags = ("--log-level", "info", "--lease-s", "5", *steps)
        with trial.daemon(*flags, environ=environ) as daemon, trial.client(daemon) as client:
            alone = client.generate(PROMPT, max_tokens=most(client))
            client.end(alone)
            reply = client.generate(PROMPT, max_tokens=most(client), deadline_s=300.0)
            for seconds in (_DAY_S, -_DAY_S, 0):
                before = len(client.deltas(reply))
                shift.write_text(f"{seconds:+d}")
                client.wait_for_deltas(reply, before + 10)
            trial.expect("request", client.outcome(reply), "length")
            trial.same_tokens(client, reply, alone)
            shift.write_text(f"{_DAY_S:+d}")
            trial.expect("then", client.outcome(client.generate(PROMPT, max_tokens=4)), "length")
            tomorrow = time.strftime("%Y-%m-%d", time.gmtime(time.time() + _DAY_S))
            client.wait(lambda: tomorrow in daemon.log())
            trial.measured["day_in_the_log"] = tomorrow
            trial.expect("state", client.ask("status")["state"], "ready")


def nothing_left(trial: Trial) -> None:
    """The log's disk is full, and peers that say nothing take the open files."""
    full = Path("/dev/full")
    with trial.daemon("--log-level", "info", log=full) as daemon, trial.client(daemon) as client:
        words = {client.outcome(client.generate(PROMPT, max_tokens=4)) for _ in range(20)}
        trial.expect("requests_without_a_log", words, {"length"})
        page = ask(Metrics(), MetricsText, str(daemon.socket)).text
        lost = page.split("\nhearth_log_lines_lost_total ")[1].split("\n")[0]
        trial.at_least("log_lines_lost_and_counted", float(lost), 20)
    with tempfile.TemporaryDirectory(prefix="hearth-") as name, trial.begun(Path(name)) as daemon:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (_FILES, _FILES))
        daemon.wait_until_ready()
        with ExitStack() as stack:
            for _ in range(_SILENT):
                stack.enter_context(connection(daemon.socket))
            started = time.monotonic()
            trial.at_most("tries", _tries(daemon, PROMPT), 5)
            trial.at_most("answer_s", seconds_since(started), 5.0)
        trial.expect("runs", daemon.runs, wanted=True)


def client_first(trial: Trial) -> None:
    """A request is sent before there is a daemon; and another client is not that patient."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:
        folder = Path(name)
        started = time.monotonic()
        try:
            with Client(folder / "hearth.sock", timeout=0.5):
                trial.broken.append("a client was welcomed by nobody")
        except ConnectionTimeout as error:
            trial.at_most("told_after_s", seconds_since(started), 2.0)
            trial.measured["told"] = error.code
        with closing(WireClient(folder / "hearth.sock", hello=False)) as client:
            client.send({"t": "hello", "proto": [1], "lease_s": 60.0})
            request = client.generate(PROMPT, max_tokens=4)
            with trial.begun(folder):
                trial.expect("request", client.outcome(request), "length")
                trial.measured["waited_s"] = seconds_since(started)
                trial.requests += 1
                trial.lost += len(client.lost())


def _tries(daemon: OwnDaemon, prompt: str) -> int:
    """Count how often a client has to ask until it is served, where each failure is told."""
    for tries in range(1, _MOST_TRIES):
        try:
            with Client(daemon.socket) as client:
                client.generate(prompt, max_tokens=4).text()
        except ConnectionFailed:
            continue
        return tries
    return _MOST_TRIES
