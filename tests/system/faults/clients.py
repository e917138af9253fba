"""Rows about clients: killed, not reading, coming again, cancelling, flooding, of equal demand."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import uvloop

from hearth.bench.arrivals.clients import Seen, open_loop
from hearth.bench.arrivals.figures import ArrivalFigures, Load, arrival_figures, calls_of, checked
from hearth.bench.arrivals.ideal import Workload, first_come
from hearth.bench.arrivals.run import PLACES, executor_report, executor_since
from hearth.bench.child_process import family_usage
from hearth.bench.toy_daemon import NO_REUSE
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Trace, TraceReport
from hearth.daemon.door.keys import add_client, make_server_keys
from hearth.daemon.own_daemon import OwnDaemon
from hearth.runtime.text.tokenizer import Tokenizer
from hearth_client import Client
from tests.system.faults.flooder import KINDS
from tests.system.faults.raw_peer import connected_peer, send_message
from tests.system.faults.trial import NotRunError, Trial, most, seconds_since
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


_RATE, _SECONDS, _CLIENTS = 6.0, 20.0, 8
_TAILS = 1.3
_GAP_S = 1.0
_FIRST_TOKEN_S = 2.0
_LIGHT = 3
_TRIES = 3
# A machine that is busy may fall behind, and nothing is refused then.
_FLAGS = ("--max-batch", str(PLACES), "--queue-requests", "4096", "--speculation", "off", *NO_REUSE)


def equal_clients(trial: Trial) -> None:
    """Eight clients of equal demand almost fill the engine; then one asks beside a heavy one."""
    if not trial.simulated:
        raise NotRunError("what fills a real engine is not known")
    with trial.daemon(*_FLAGS) as daemon:
        # The model knows no pauses of the machine: on a busy one a later try may be free of them.
        for _ in range(_TRIES):
            found = _measured(trial, daemon)
            if max(found.tail_ratios.values()) <= _TAILS:
                break
        trial.expect("failed", found.failed, 0)
        trial.measured["first_token_p99_ms"] = found.ttft_p99_ms
        trial.measured["reply_longest_ms"] = found.whole_longest_ms
        for tail, ratio in found.tail_ratios.items():
            trial.at_most(f"{tail}_ratio", ratio, _TAILS)
        trial.at_most("gap_longest_s", found.gap_longest_ms / 1000, _GAP_S)
        with trial.client(daemon) as heavy, trial.client(daemon) as light:
            flood = [heavy.generate(f"{n}", max_tokens=most(heavy)) for n in range(2 * PLACES)]
            for one in flood[:PLACES]:
                heavy.wait_for_deltas(one)
            waits = []
            for number in range(_LIGHT):
                began = time.monotonic()
                asked = light.generate(f"light {number}", max_tokens=8)
                light.wait_for_deltas(asked)
                waits.append(light.of(asked)[-1].seconds - began)
                light.end(asked)
            trial.at_most("light_first_token_s", max(waits), _FIRST_TOKEN_S)
            for one in flood:
                heavy.cancel(one)
                heavy.end(one)


def _measured(trial: Trial, daemon: OwnDaemon) -> ArrivalFigures:
    asks = Workload(Tokenizer.open(trial.engine)).poisson(_RATE, _SECONDS)
    before = executor_report(daemon.socket)
    watched = uvloop.run(open_loop(daemon.socket, asks, _CLIENTS))
    calls = calls_of(executor_since(daemon.socket, before), watched.seen)
    load = Load(_RATE, _SECONDS, calls, watched, first_come(asks, calls, PLACES))
    return arrival_figures(load, checked(watched.seen, _tokens))


def _tokens(one: Seen) -> list[int]:
    return one.tokens


_PHASE_S = 3.0
_FLOOD_RATE = 0.9
_FLOOD_GAP_S = 0.15
_PROMPT = "the lamp is on"


class Beside(NamedTuple):
    """A stream beside another process: its tokens a second, its longest gap, and what that took."""

    tokens_per_s: float
    gap_s: float
    share: float


def flood(trial: Trial) -> None:
    """Another process floods the daemon with each kind of message, then burns as much CPU."""
    worst_rate, worst_gap, flooded, burnt = 1e9, 0.0, {}, {}
    with trial.daemon() as daemon, trial.client(daemon) as client:
        for kind in KINDS:
            found = _beside(client, "flood", str(daemon.socket), kind)
            alone = _beside(client, "burn", f"{min(found.share, 1.0):.3f}")
            flooded[kind], burnt[kind] = _words(found), _words(alone)
            worst_rate = min(worst_rate, found.tokens_per_s / alone.tokens_per_s)
            worst_gap = max(worst_gap, found.gap_s)
        errors = client.ask("status").get("totals", {}).get("internal_errors", 0)
    trial.measured |= {"beside_a_flood": flooded, "beside_a_burner": burnt}
    trial.at_least("rate_beside_a_flood", worst_rate, _FLOOD_RATE)
    trial.at_most("longest_gap_s", worst_gap, _FLOOD_GAP_S)
    trial.expect("internal_errors", errors, 0)


def _beside(client: WireClient, *arguments: str) -> Beside:
    """Measure a stream for `_PHASE_S` beside a process of these arguments."""
    request = client.generate(_PROMPT, max_tokens=most(client))
    client.wait_for_deltas(request)
    with _process(*arguments) as process:
        client.listen(_PHASE_S / 10)
        before, began = len(client.deltas(request)), time.monotonic()
        client.listen(_PHASE_S)
        seconds = time.monotonic() - began
        # What is late counts, too.
        received = client.deltas(request)[before - 1 :]
        times = [*(one.seconds for one in received), time.monotonic()]
        share = _share_of(process)
    client.cancel(request)
    client.end(request)
    tokens = sum(len(one.answer["tokens"]) for one in received[1:])
    gap = max(later - earlier for earlier, later in pairwise(times))
    return Beside(tokens / seconds, gap, share)


@contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.system.faults.flooder", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if process.stdout is not None:
            process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def _share_of(process: subprocess.Popen[str]) -> float:
    """Which share of a processor it took, as it says at its end."""
    return float(process.communicate()[0])


def _words(found: Beside) -> str:
    rate = f"{found.tokens_per_s:.0f} tokens/s, gap {1000 * found.gap_s:.0f} ms"
    return f"{rate}, {found.share:.0%} of a processor"
