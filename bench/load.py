"""`hearth bench load`: many clients in some processes, and every token is checked."""

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click
import msgspec

from hearth.bench.arrivals.run import LOADS, MODES, run_arrivals
from hearth.bench.child_process import ChildProcess
from hearth.bench.load_clients import Connected, Go, LoadJob, Tally
from hearth.bench.report import Record, log_folder, note, print_fields, publish, record_option
from hearth.bench.toy_daemon import NO_REUSE, engine_option, given_or_toy, simulated_flags
from hearth.daemon.cli.errors import FAILED
from hearth.daemon.cli.options import NumberRange, json_option
from hearth.daemon.own_daemon import own_daemon

_PROGRESS_TIMEOUT_S = 120.0
_CHECKED = {"requests": 10_000, "clients": 32, "processes": 4, "max_tokens": 64}
_TIMED = {
    "load": LOADS,
    "mode": MODES,
    "seconds": 120.0,
    "prefill_us": 0.0,
    "prefill_budget": 1.0,
    "adapters": 0,
    "engine": None,
    "clients": 0,
}


class LoadFigures(Tally, kw_only=True, tag=False):
    """The tally of all clients and how fast they were served."""

    seconds: float
    tokens_per_s: float


@click.command()
@click.option("--requests", type=click.IntRange(1), metavar="N", help="How many.  [10000]")
@click.option(
    "--clients",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Who send; with --arrivals each asks by chance.  [32, or 16 in turns]",
)
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Processes that the clients are spread over.  [4]",
)
@click.option("--max-tokens", type=click.IntRange(1, 1024), metavar="N", help="Of a reply.  [64]")
@click.option(
    "--step-ms", type=NumberRange(0), metavar="X", help="Of the simulated engine.  [2, or 10]"
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson"]),
    help="Time requests of random sizes that come at random, beside an ideal. The options from "
    "--load to --engine are for this alone, those before --step-ms are not, but for --clients.",
)
@click.option(
    "--load",
    multiple=True,
    type=click.Choice(LOADS),
    help="Offer this share of a full house's rate; may be given more than once.  [all]",
)
@click.option(
    "--mode",
    multiple=True,
    type=click.Choice(MODES),
    help="The daemon's setting of batching; may be given more than once.  [all]",
)
@click.option(
    "--seconds", type=NumberRange(0, min_open=True), metavar="X", help="Of arrivals.  [120]"
)
@click.option("--prefill-us", type=NumberRange(0), metavar="X", help="Of a simulated token.  [0]")
@click.option(
    "--prefill-budget",
    type=NumberRange(0, 1000, min_open=True),
    metavar="X",
    help="The daemon's setting: by how many steps a piece of prompt may take longer.  [1]",
)
@click.option(
    "--adapters",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Let each request ask for one of so many adapters, beside a run with one.  [none]",
)
@engine_option("a simulated one; its tokens are counted, not checked")
@click.option(
    "--name", default="", metavar="NAME", help="The key of these figures in a record.  [load]"
)
@record_option
@json_option
def load(
    arrivals: str | None,
    step_ms: float | None,
    name: str,
    record: Record,
    *,
    as_json: bool,
    **given: Any,
) -> int:
    """Check every token of many clients against the simulated engine's truth.

    The way is the real one: client library, socket, front door, actors, executor process. The
    exit code is 1 when anything was lost, doubled or out of order, and where clients with
    --arrivals were late themselves.
    """
    if name and record.file is None:
        raise click.UsageError("--name is for --record")
    options = chosen(given, arrivals=bool(arrivals))
    if arrivals:
        return run_arrivals(options, step_ms, name or "load", record, as_json=as_json)
    flags = (*simulated_flags(2.0 if step_ms is None else step_ms), *NO_REUSE)
    processes = min(options.pop("processes"), options["clients"])
    with given_or_toy() as engine, own_daemon(engine, flags) as daemon:
        whole = LoadJob(socket=str(daemon.socket), engine=str(engine), **options)
        figures = run_jobs(split_job(whole, processes), log_folder())
        daemon.stop()
    title = f"{whole.clients} clients, {whole.max_tokens} tokens each"
    publish(figures, lambda: print_fields(title, figures), as_json=as_json)
    record.keep({name or "load": figures})
    return 0 if figures.clean and figures.requests == whole.requests else FAILED


def chosen(given: Mapping[str, Any], *, arrivals: bool) -> dict[str, Any]:
    """The options of one way to load, with their defaults; raises click.UsageError for others."""
    mine, others = (_TIMED, _CHECKED) if arrivals else (_CHECKED, _TIMED)
    for option in others:
        if option not in mine and given[option] not in {None, ()}:
            which = "without" if arrivals else "with"
            raise click.UsageError(f"--{option.replace('_', '-')} goes {which} --arrivals")
    return {option: given[option] or default for option, default in mine.items()}


def split_job(whole: LoadJob, processes: int) -> list[LoadJob]:
    """Spread clients and requests evenly over processes."""
    return [
        msgspec.structs.replace(
            whole,
            clients=_share(whole.clients, processes, index),
            requests=_share(whole.requests, processes, index),
            seed=index,
        )
        for index in range(processes)
    ]


def run_jobs(jobs: list[LoadJob], logs: Path) -> LoadFigures:
    """Run all client processes side by side and add up their tallies.

    They begin together once all are connected: how rows meet in steps would follow otherwise from
    which process was ready first, and the time from how long they took to start.
    """
    total = Tally()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(closing(ChildProcess("hearth.bench.load_clients", job, log)))
            for job in jobs
            for log in [logs / f"load-clients-{job.seed}.log"]
        ]
        for worker in workers:
            worker.receive(Connected, _PROGRESS_TIMEOUT_S)
        started = time.monotonic()
        for worker in workers:
            worker.send(Go())
        for worker, job in zip(workers, jobs, strict=True):
            total.add(_finish(worker, job))
    seconds = time.monotonic() - started
    return LoadFigures(
        **msgspec.structs.asdict(total), seconds=seconds, tokens_per_s=total.tokens / seconds
    )


def _finish(worker: ChildProcess, job: LoadJob) -> Tally:
    while True:
        tally: Tally = worker.receive(Tally, _PROGRESS_TIMEOUT_S)
        if tally.requests == job.requests:
            return tally
        note(f"process {job.seed}: {tally.requests} of {job.requests} requests")


def _share(total: int, parts: int, index: int) -> int:
    return total // parts + (index < total % parts)
