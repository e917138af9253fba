"""`hearth bench decode`: one greedy row, beside the peers and the memory-read floor."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import numpy as np
from msgspec import structs

from bench.cases import Artifacts, Case
from bench.figures import DecodeFigures, decode_figures
from bench.floor import KERNELS, PASSES
from bench.worker import Worker
from bench.worker_messages import Job
from runtime.errors import HearthError

Note = Callable[[str], None]
PROMPT_TOKENS = 32
_WARM_UP = 3


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured: `rounds` times `steps` steps of each contender, in turns."""

    threads: int
    rounds: int = 7
    steps: int = 10
    prompt: list[int]
    precision: str = ""
    spin: bool | None = None


class DecodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller chose; `spin` None is Hearth's default, `quick` a toy and few steps."""

    threads: int
    spin: bool | None = None
    quick: bool = False


def prompt_ids() -> list[int]:
    """The prompt of every contender: ids that each model of the bench has."""
    ids = np.random.default_rng(0).integers(3, 256, PROMPT_TOKENS)
    return [int(token) for token in ids]


def make_plan(case: Case, options: DecodeOptions, precision: str = "") -> Plan:
    """The plan of a case; `precision` is that of transformers when it is known already."""
    return Plan(
        threads=options.threads,
        rounds=2 if options.quick else 7,
        steps=2 if options.quick else case.steps,
        prompt=prompt_ids(),
        precision="float32" if case.precision == "fp32" else precision,
        spin=options.spin,
    )


def measure(case: Case, artifacts: Artifacts, plan: Plan, logs: Path, note: Note) -> DecodeFigures:
    """Run all contenders at the same context lengths in turns; absent peers are noted.

    Raises HearthError when Hearth itself cannot run.
    """
    with ExitStack() as stack:
        workers, notes = _start(case.name, _jobs(artifacts, plan), logs, stack, note)
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for name, worker in workers.items():
            worker.advance(len(KERNELS) if name == "floor" else _WARM_UP)
        for turn in range(plan.rounds):
            note(f"{case.name}: round {turn + 1} of {plan.rounds}")
            for name, worker in workers.items():
                seconds[name] += worker.advance(_steps_of(name, plan))
    if artifacts.gguf is None:
        notes.append("gguf is not installed: make bench-env")
    equal_weights = ("hearth", "transformers", "llama_cpp") if case.precision == "fp32" else ()
    return decode_figures(
        seconds,
        weight_bytes=artifacts.weight_bytes,
        tokens={name: workers[name].tokens for name in equal_weights if name in workers},
        precision=workers["transformers"].precision if "transformers" in workers else "",
        notes=notes,
    )


def _start(
    name: str, jobs: Sequence[Job], logs: Path, stack: ExitStack, note: Note
) -> tuple[dict[str, Worker], list[str]]:
    workers: dict[str, Worker] = {}
    notes: list[str] = []
    for job in jobs:
        note(f"{name}: loading {job.contender}")
        log = logs / f"{name.replace('/', '-')}-{job.contender}.log"
        worker = stack.enter_context(closing(Worker(job, log)))
        if not worker.unavailable:
            workers[job.contender] = worker
        elif job.contender == "hearth":
            raise HearthError("internal", worker.unavailable)
        else:
            notes.append(worker.unavailable)
    return workers, notes


def _jobs(artifacts: Artifacts, plan: Plan) -> list[Job]:
    common = Job(
        contender="hearth",
        threads=plan.threads,
        prompt=plan.prompt,
        steps=_WARM_UP + plan.rounds * plan.steps,
    )
    jobs = [
        structs.replace(common, path=str(artifacts.engine), spin=plan.spin),
        structs.replace(
            common,
            contender="transformers",
            path=str(artifacts.source),
            precision=plan.precision,
        ),
        structs.replace(common, contender="floor", bytes=artifacts.weight_bytes),
    ]
    if artifacts.gguf is not None:
        jobs.insert(2, structs.replace(common, contender="llama_cpp", path=str(artifacts.gguf)))
    return jobs


def _steps_of(name: str, plan: Plan) -> int:
    # The passes of the floor are spread over the rounds, so that it sees the same machine.
    passes = PASSES * len(KERNELS)
    return -(-passes // plan.rounds) if name == "floor" else plan.steps
