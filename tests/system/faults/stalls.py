"""A row about clients that ask for as much as each other, and one that asks for less."""

import time

import uvloop

from hearth.bench.arrivals.clients import Seen, open_loop
from hearth.bench.arrivals.figures import ArrivalFigures, Load, arrival_figures, calls_of, checked
from hearth.bench.arrivals.ideal import Workload, first_come
from hearth.bench.arrivals.run import PLACES, executor_report, executor_since
from hearth.bench.toy_daemon import NO_REUSE
from hearth.daemon.own_daemon import OwnDaemon
from hearth.runtime.text import Tokenizer
from tests.system.faults.trial import NotRunError, Trial, most

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
