"""The loads of `hearth bench load --arrivals poisson`, against a daemon for each mode."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import uvloop

from hearth.bench.arrivals.clients import Seen, closed_loop, open_loop
from hearth.bench.arrivals.figures import (
    ArrivalFigures,
    Load,
    arrival_figures,
    calls_of,
    checked,
    full_house_rate,
    since,
)
from hearth.bench.arrivals.ideal import (
    MAX_RANK,
    MEAN_REPLY,
    Workload,
    add_adapters,
    first_come,
    in_turn,
    spread,
)
from hearth.bench.load_clients import simulated_stream
from hearth.bench.report import Record, judged, note, print_cases, publish
from hearth.bench.toy_daemon import NO_REUSE, given_or_toy, simulated_flags
from hearth.daemon.cli.errors import Failure
from hearth.daemon.own_daemon import own_daemon
from hearth.runtime.config import load_config
from hearth.runtime.text.tokenizer import Tokenizer
from hearth_client import Client
from hearth_client.protocol import ExecutorReport

PLACES = 8
SATURATED = "saturated"
ONE = "/one"
"""Suffix of a load's name: the same load with one adapter."""
LOADS = ("0.5", "0.8", "0.95", SATURATED)
MODES = ("joining", "synchronous")
_FIELDS = (
    "offered ttft_p50_ms ttft_p99_ms ideal_p50_ms ideal_p99_ms whole_p99_ms whole_longest_ms "
    "ideal_whole_p99_ms ideal_whole_longest_ms gap_p99_ms gap_longest_ms tokens_per_s "
    "ideal_tokens_per_s places_used decode_ms prefill_ms late_p99_ms"
)
_STEP_MS = 10.0
_CLOSED_CLIENTS = 16
_HOUSES = 3
_HOUSE_TRIES = 10
_HOUSE_TOKENS = 64
_REPORT_TIMEOUT_S = 10.0
_REPORT_PAUSE_S = 0.1
# Nothing is refused however long the queue grows: waiting is what is measured.
_FLAGS = (
    *("--max-batch", str(PLACES), "--speculation", "off", "--log-level", "warning"),
    *("--queue-requests", str(1 << 20), "--queue-tokens", str(1 << 30)),
    *("--requests-per-client", "4096"),
)


class ArrivalPlan(NamedTuple):
    """Loads measured on an engine folder, under daemons with `flags`; `seconds` of each load.

    `keep` is called with mode, load and figures after each load. Requests ask for one of so many
    `adapters`; where these are several each load is repeated with one. They are of so many
    `clients` by chance, 0 is for connections that take turns.
    """

    engine: Path
    flags: Sequence[str]
    simulated: bool
    modes: Sequence[str]
    loads: Sequence[str]
    seconds: float
    keep: Callable[[str, str, ArrivalFigures], None]
    adapters: int = 0
    clients: int = 0


def run_arrivals(
    options: Mapping[str, Any], step_ms: float | None, name: str, record: Record, *, as_json: bool
) -> int:
    """Measure what the options of `bench load` ask for, and publish it; gives the exit code."""
    given: Path | None = options["engine"]
    flags: tuple[str, ...] = ()
    if given is None:
        flags = simulated_flags(_STEP_MS if step_ms is None else step_ms, options["prefill_us"])
    elif step_ms is not None or options["prefill_us"]:
        raise click.UsageError("--step-ms and --prefill-us are for the simulated engine")
    flags += ("--prefill-budget", str(options["prefill_budget"]))
    found: dict[str, ArrivalFigures] = {}

    def keep(mode: str, load: str, figures: ArrivalFigures) -> None:
        found[f"{mode}/{load}"] = figures
        record.keep({f"{name}/{mode}/{load}": figures})

    adapters: int = options["adapters"]
    with given_or_toy(given, MAX_RANK if adapters else 0) as engine:
        plan = ArrivalPlan(
            engine=engine,
            flags=flags,
            simulated=given is None,
            modes=options["mode"],
            loads=options["load"],
            seconds=options["seconds"],
            keep=keep,
            adapters=adapters,
            clients=options["clients"],
        )
        run = ArrivalRun(plan)
        by_mode = run.run()
    house = run.full_house_tokens_per_s
    title = f"Random arrivals; a full house gives {house:.1f} tokens/s"
    ratios: dict[str, Any] = {"adapters_ttft_p99_ratio": _ratios(found)} if adapters > 1 else {}
    if options["clients"]:
        ratios["tail_ratios"] = {case: figures.tail_ratios for case, figures in found.items()}
        record.keep({f"{name}/tail_ratios": ratios["tail_ratios"]})
    publish(
        {**by_mode, **ratios, "full_house_tokens_per_s": house},
        lambda: print_cases(title, _FIELDS, found),
        as_json=as_json,
    )
    record.keep({f"{name}/full_house_tokens_per_s": house})
    return judged(_faults(found))


def _ratios(found: Mapping[str, ArrivalFigures]) -> dict[str, float]:
    """Ratio of first tokens' waits with several adapters to those with one, at the 99th."""
    return {
        case: figures.ttft_p99_ms / found[case + ONE].ttft_p99_ms
        for case, figures in found.items()
        if case + ONE in found
    }


def _faults(found: Mapping[str, ArrivalFigures]) -> Iterator[str]:
    for case, figures in found.items():
        if not figures.credible:
            yield f"{case}: the clients were late themselves, measure again on a quiet machine"
    for case, figures in found.items():
        if not figures.clean:
            yield f"{case}: tokens were lost or wrong, or requests failed"


class ArrivalRun:
    """Loads one after the other; the rate of full places is measured in the first mode."""

    def __init__(self, plan: ArrivalPlan) -> None:
        self.full_house_tokens_per_s = 0.0
        self._plan = plan
        self._config = load_config(plan.engine)
        self._tokenizer = Tokenizer.open(plan.engine)
        self._workload = Workload(self._tokenizer)

    def run(self) -> dict[str, dict[str, ArrivalFigures]]:
        """Figures by mode and load."""
        return {mode: self._mode(mode) for mode in self._plan.modes}

    def _mode(self, mode: str) -> dict[str, ArrivalFigures]:
        plan, found = self._plan, {}
        flags = (*_FLAGS, *NO_REUSE, *plan.flags, "--batching", mode)
        with own_daemon(plan.engine, flags) as daemon:
            if not self.full_house_tokens_per_s:
                self.full_house_tokens_per_s = self._full_rate(daemon.socket)
                note(f"a full house gives {self.full_house_tokens_per_s:.1f} tokens/s")
            names = add_adapters(daemon.socket, self._config, plan.adapters)
            for load in plan.loads:
                for case, asked in ((load, names), (load + ONE, names[:1])):
                    if case == load or len(names) > 1:
                        note(f"{mode}, load {case}")
                        found[case] = self._load(daemon.socket, load, asked)
                        plan.keep(mode, case, found[case])
            daemon.stop()
        return found

    def _full_rate(self, socket: Path) -> float:
        """Tokens a second while all places decode, the median of some tries in which they did."""
        asks = self._workload.alike(PLACES, _HOUSE_TOKENS)
        rates: list[float] = []
        for _ in range(_HOUSE_TRIES):
            rate = full_house_rate(uvloop.run(open_loop(socket, asks)))
            rates += [] if rate is None else [rate]
            if len(rates) == _HOUSES:
                return median(rates)
        raise Failure("eight requests at once were never served together")

    def _load(self, socket: Path, load: str, names: Sequence[str]) -> ArrivalFigures:
        seconds, before = self._plan.seconds, executor_report(socket)
        rate = self.full_house_tokens_per_s / MEAN_REPLY
        closed = load == SATURATED
        clients = self._plan.clients
        if closed:
            clients = clients or _CLOSED_CLIENTS
            # Half as many again as can be served.
            asks = self._workload.first(clients + round(1.5 * rate * seconds))
            asks = spread(asks, names)
            watched = uvloop.run(closed_loop(socket, asks, clients, seconds))
        else:
            asks = spread(self._workload.poisson(float(load) * rate, seconds), names)
            watched = uvloop.run(open_loop(socket, asks, clients))
        did = executor_since(socket, before)
        calls = calls_of(did, watched.seen)
        ideal = (
            in_turn(asks, calls, PLACES, clients, seconds)
            if closed
            else first_come(asks, calls, PLACES)
        )
        offered = None if closed else len(asks) / seconds
        truth = checked(watched.seen, self._truth)
        return arrival_figures(Load(offered, seconds, calls, watched, ideal), truth)

    def _truth(self, one: Seen) -> list[int]:
        # A real engine's tokens are not known: they count as they come.
        if not self._plan.simulated:
            return one.tokens
        prompt = self._tokenizer.encode(one.ask.prompt)
        return simulated_stream(self._config, prompt, one.ask.tokens, one.ask.adapter)


def executor_report(socket: Path) -> ExecutorReport | None:
    """Ask what the executor of the daemon at `socket` has done."""
    with Client(socket) as client:
        return client.status().executor


def executor_since(socket: Path, before: ExecutorReport | None) -> ExecutorReport:
    """Ask what the executor did since `before`, as it reports every second."""
    deadline = time.monotonic() + _REPORT_TIMEOUT_S
    while time.monotonic() < deadline:
        report = executor_report(socket)
        did = None if report is None else since(before, report)
        if did is not None and did.prefill.steps and did.generation.steps:
            return did
        time.sleep(_REPORT_PAUSE_S)
    raise Failure("the executor does not tell what it did")
