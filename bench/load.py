"""`hearth bench load`: many clients in some processes, and every token is checked."""

import time
from contextlib import ExitStack, closing
from pathlib import Path

import click
import msgspec

from bench.child_process import ChildProcess
from bench.load_clients import LoadJob, Tally
from bench.report import log_folder, note, print_fields, publish
from bench.toy_daemon import given_or_toy, simulated_flags
from daemon.cli.errors import FAILED
from daemon.cli.options import json_option
from daemon.own_daemon import own_daemon

_PROGRESS_TIMEOUT_S = 120.0


class LoadFigures(Tally, kw_only=True, tag=False):
    """The tally of all clients and how fast they were served."""

    seconds: float
    tokens_per_s: float


@click.command()
@click.option("--requests", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--clients", type=click.IntRange(1, 64), default=32, show_default=True)
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Processes that the clients are spread over.",
)
@click.option("--max-tokens", type=click.IntRange(1, 1024), default=64, show_default=True)
@click.option("--step-ms", type=click.FloatRange(0), default=2.0, show_default=True)
@json_option
def load(
    requests: int, clients: int, processes: int, max_tokens: int, step_ms: float, *, as_json: bool
) -> int:
    """Check every token of many clients against the simulated engine's truth.

    The way is the real one: client library, socket, front door, actors, executor process. The
    exit code is 1 when anything was lost, doubled or out of order.
    """
    with given_or_toy() as engine, own_daemon(engine, simulated_flags(step_ms)) as daemon:
        whole = LoadJob(
            socket=str(daemon.socket),
            engine=str(engine),
            clients=clients,
            requests=requests,
            max_tokens=max_tokens,
        )
        figures = run_jobs(split_job(whole, min(processes, clients)), log_folder())
        daemon.stop()
    title = f"{clients} clients, {max_tokens} tokens each"
    publish(figures, lambda: print_fields(title, figures), as_json=as_json)
    return 0 if figures.clean and figures.requests == requests else FAILED


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
    """Run all client processes side by side and add up their tallies."""
    started = time.monotonic()
    total = Tally()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(closing(ChildProcess("bench.load_clients", job, log)))
            for job in jobs
            for log in [logs / f"load-clients-{job.seed}.log"]
        ]
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
