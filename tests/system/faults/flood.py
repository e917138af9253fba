"""A row about a client that floods the daemon, beside the stream of another one."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

from tests.system.faults.flooder import KINDS
from tests.system.faults.trial import Trial, most
from tests.system.faults.wire_client import WireClient

_PHASE_S = 3.0
_RATE = 0.9
_GAP_S = 0.15
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
    trial.at_least("rate_beside_a_flood", worst_rate, _RATE)
    trial.at_most("longest_gap_s", worst_gap, _GAP_S)
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
