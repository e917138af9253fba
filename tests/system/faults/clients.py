"""Rows about clients that are killed, that do not read, that come again, and that cancel."""

import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from hearth.bench.child_process import family_usage
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Trace, TraceReport
from hearth.daemon.door.keys import add_client, make_server_keys
from hearth_client import Client
from tests.system.faults.raw_peer import connected_peer, send_message
from tests.system.faults.trial import Trial, most, seconds_since
from tests.system.faults.wire_client import PATIENCE_S, WireClient

PROMPT = "the lamp is on"
_KILLED_CLIENT = """
import sys
from hearth_client import Client
client = Client(sys.argv[1], lease_s=float(sys.argv[2]))
for delta in client.generate("doomed", max_tokens=int(sys.argv[3]), ignore_eos=True):
    print("delta", flush=True)
"""
_GROWTH_MB = 100.0
_TEXTS = 16
_TEXT_TOKENS = 32_000
_PAUSE_S = 0.05
_LEASE_S = 2.0
_PLACES = 8


def client_killed(trial: Trial) -> None:
    """A client is killed while its reply streams, beside another one."""
    daemon = trial.shared()
    with trial.client(daemon) as client:
        alone = client.generate(PROMPT, max_tokens=60, logprobs=8)
        client.end(alone)
        words = (str(daemon.socket), str(_LEASE_S), str(most(client)))
        doomed = subprocess.Popen(
            [sys.executable, "-c", _KILLED_CLIENT, *words], stdout=subprocess.PIPE
        )
        try:
            if doomed.stdout is not None:
                doomed.stdout.readline()
            beside = client.generate(PROMPT, max_tokens=60, logprobs=8)
            client.wait_for_deltas(beside, 3)
        finally:
            doomed.kill()
            killed = time.monotonic()
            doomed.communicate()
        client.wait_for_status(lambda status: status["clients"] == 1)
        trial.at_most("evicted_s", seconds_since(killed), _LEASE_S)
        client.end(beside)
        trial.same_tokens(client, beside, alone)


def client_stops_reading(trial: Trial) -> None:
    """A client asks for a reply and for long texts, and reads nothing."""
    daemon = trial.shared()
    with trial.client(daemon) as client, connected_peer(daemon.socket) as deaf:
        before = family_usage(daemon.pid).rss_bytes
        quiet = client.generate(PROMPT, max_tokens=100)
        client.end(quiet)
        _say(deaf, t="hello", proto=[1], client="deaf")
        beside = client.generate(PROMPT, max_tokens=100)
        started, largest, ended = time.monotonic(), before, set[str]()
        for number in count():
            # Replies of a fast engine end before anybody is found to be slow.
            _say(
                deaf,
                t="generate",
                id=f"{number}",
                prompt=PROMPT,
                max_tokens=most(client),
                ignore_eos=True,
            )
            for text in range(_TEXTS):
                _say(deaf, t="detokenize", id=f"text {text}", tokens=[65] * _TEXT_TOKENS)
            client.listen(_PAUSE_S)
            largest = max(largest, family_usage(daemon.pid).rss_bytes)
            ended = _reasons(daemon.socket, "deaf")
            if "slow_client" in ended or seconds_since(started) > PATIENCE_S:
                break
        trial.at_most("ended_s", seconds_since(started), 30.0)
        trial.expect("ended_as_slow_client", "slow_client" in ended, wanted=True)
        trial.at_most("grown_mb", (largest - before) / 1e6, _GROWTH_MB)
        client.end(beside)
        trial.measured["ms_a_token_before"] = _ms_a_token(client, quiet)
        trial.measured["ms_a_token_beside"] = _ms_a_token(client, beside)
        trial.same_tokens(client, beside, quiet)


def places_taken(trial: Trial) -> None:
    """One user takes all places for an hour, and another one comes, with a key by TCP."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="hearth-")))
        keys, key = folder / "keys", folder / "key"
        make_server_keys(keys)
        add_client(keys, "other", hand_over=key)
        port = stack.enter_context(closing(_free_port()))
        number = port.getsockname()[1]
        flags = ("--clients", str(_PLACES), "--tcp-port", str(number), "--keys", str(keys))
        port.close()
        daemon = stack.enter_context(trial.daemon(*flags))
        talks = [stack.enter_context(trial.client(daemon, hello=False)) for _ in range(_PLACES + 1)]
        codes = [one.send_hello(lease_s=3600.0).get("code", "") for one in talks]
        trial.expect("of_the_same_user", codes, [*[""] * _PLACES, "too_many_clients"])
        working = [one.generate(PROMPT, max_tokens=1000) for one in talks[:2]]
        for client, request in zip(talks, working, strict=False):
            client.wait_for_deltas(request)
        with Client(f"tcp://127.0.0.1:{number}", client_key=key) as other:
            started = time.monotonic()
            other.generate(PROMPT, max_tokens=4, ignore_eos=True).text()
            trial.at_most("served_after_s", seconds_since(started), 1.0)
            told = [one.ask("status").get("code", "") for one in talks[:_PLACES]]
        trial.expect("places_lost", told.count("hello_required"), 1)
        trial.expect("of_who_worked", told[:2], ["", ""])
        for client, request in zip(talks, working, strict=False):
            client.cancel(request)
            client.end(request)


def _free_port() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def _say(peer: socket.socket, **fields: Any) -> None:
    with suppress(OSError):  # it may have been put out already
        send_message(peer, msgspec.msgpack.encode(fields))


def _reasons(socket_path: Path, client: str) -> set[str]:
    """Why the last requests of the client of that name ended."""
    ended = ask(Trace(last=64), TraceReport, str(socket_path)).requests
    return {one.reason for one in ended if one.client == client}


def _ms_a_token(client: WireClient, request_id: str) -> float:
    usage = client.end(request_id).answer["usage"]
    return float(usage["decode_ms"]) / int(usage["completion_tokens"])
