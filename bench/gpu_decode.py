"""`hearth bench decode --device cuda`: the GPU engines beside PyTorch and the read bandwidth."""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import msgspec
from msgspec import structs

from bench.actor_step import actor_step_s
from bench.cases import CAPACITY
from bench.decode import PROMPT_TOKENS, Note, prompt_ids
from bench.gpu_cases import GPUCase, engine_step_bytes
from bench.gpu_figures import SETTLE, GPUFigures, GPUTimes, gpu_figures, step_seconds
from bench.worker import Worker
from bench.worker_messages import Device, Job
from daemon.cli.errors import Failure
from runtime.errors import HearthError

FLOOR = "read bandwidth"
_WARM_UP = 5
_FLOOR_PASSES = 4
_RAW_LAUNCHES = 50
_RAW_WINDOWS = 5
# A step must be over before the next is asked for, when the host's own time is wanted.
_HOST_PAUSE = 2.0


class GPUPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured: `rounds` times `steps` steps of each contender, in turns.

    Behind each round come `host_steps` more, for the host's own time of an engine. `device` "cpu"
    is for tests: the same way without a GPU. `actor` starts a daemon as well.
    """

    device: Device = "cuda"
    dtype: str = "float16"
    rounds: int = 7
    steps: int = 40
    host_steps: int = 17
    actor: bool = True


class GPUArtifacts(msgspec.Struct, frozen=True, kw_only=True):
    """The weights for the peers, and an engine folder by the name of its engine."""

    source: Path
    engines: Mapping[str, Path]


def measure_gpu(
    case: GPUCase, artifacts: GPUArtifacts, plan: GPUPlan, logs: Path, note: Note
) -> dict[str, GPUFigures]:
    """Figures by engine; an engine or peer that cannot run here is noted and left out.

    A contender that fails later on ends the run: what it has disturbed is not known. A daemon
    that fails, when the others have ended, is noted.
    """
    context = PROMPT_TOKENS + _WARM_UP + plan.rounds * (plan.steps + plan.host_steps) / 2
    sizes = {
        name: engine_step_bytes(folder, case.batch, context)
        for name, folder in artifacts.engines.items()
    }
    with ExitStack() as stack:
        jobs = _jobs(case, artifacts, plan, max(sizes.values(), default=0))
        workers, notes = _start(case, jobs, logs, stack, note)
        engines = [name for name in artifacts.engines if name in workers]
        if not engines:
            return {}
        times = _take_turns(case, workers, plan, note)
        for name in engines:
            times.raw[name] = _raw_step_s(workers[name])
    for name in engines if plan.actor else ():
        note(f"{case.name}: {name} through a daemon")
        try:
            times.alone[name] = _alone_step_s(jobs[name], plan, _log(logs, case, name))
            times.actor[name] = actor_step_s(artifacts.engines[name], case.batch)
        except (HearthError, Failure) as error:
            notes.append(f"{name} was not measured through a daemon: {error}")
            note(f"{case.name}: {notes[-1]}")
    return {
        name: gpu_figures(
            name,
            times,
            batch=case.batch,
            step_bytes=sizes[name],
            dtype=plan.dtype,
            notes=notes,
        )
        for name in engines
    }


def _jobs(
    case: GPUCase, artifacts: GPUArtifacts, plan: GPUPlan, floor_bytes: float
) -> dict[str, Job]:
    common = Job(
        contender="hearth",
        prompt=prompt_ids(),
        steps=_WARM_UP + plan.rounds * (plan.steps + plan.host_steps),
        batch=case.batch,
        capture=True,
        device=plan.device,
        precision=plan.dtype,
        capacity=CAPACITY,
    )
    source = str(artifacts.source)
    return {
        **{name: structs.replace(common, path=str(f)) for name, f in artifacts.engines.items()},
        "transformers": structs.replace(common, contender="static_cache", path=source),
        "torch_compile": structs.replace(common, contender="torch_compile", path=source),
        FLOOR: structs.replace(common, contender="gpu_floor", bytes=int(floor_bytes)),
    }


# Peers alone are of no use: they are loaded when an engine runs.
def _start(
    case: GPUCase, jobs: Mapping[str, Job], logs: Path, stack: ExitStack, note: Note
) -> tuple[dict[str, Worker], list[str]]:
    workers: dict[str, Worker] = {}
    notes: list[str] = []
    for name, job in jobs.items():
        if job.contender != "hearth" and not workers:
            return {}, notes
        note(f"{case.name}: loading {name}")
        try:
            worker = stack.enter_context(closing(Worker(job, _log(logs, case, name))))
        except HearthError as error:
            reason = error.message
        else:
            reason = worker.unavailable
        if reason:
            notes.append(f"{name} is left out: {reason}")
            note(f"{case.name}: {notes[-1]}")
        else:
            workers[name] = worker
    return workers, notes


def _take_turns(
    case: GPUCase, workers: Mapping[str, Worker], plan: GPUPlan, note: Note
) -> GPUTimes:
    models = [name for name in workers if name != FLOOR]
    rounds: dict[str, list[list[float]]] = {name: [] for name in models}
    host: dict[str, list[float]] = {name: [] for name in models}
    floor: list[float] = []
    for name in models:
        workers[name].advance(_WARM_UP)
    for turn in range(plan.rounds):
        note(f"{case.name}: round {turn + 1} of {plan.rounds}")
        for name in models:
            rounds[name].append(workers[name].advance(plan.steps))
            host[name] += _host_steps(workers[name], plan, step_seconds(rounds[name][-1:]))
        if FLOOR in workers:
            floor += workers[FLOOR].advance(_FLOOR_PASSES)
    size = workers[FLOOR].job.bytes if FLOOR in workers else 0
    seen = {name: steps for name, steps in host.items() if steps}
    return GPUTimes(rounds=rounds, floor=floor, floor_bytes=size, host=seen)


def _host_steps(worker: Worker, plan: GPUPlan, step_s: float) -> list[float]:
    """Seconds of steps that wait for nothing; a peer has none, and takes as many steps."""
    # On a CPU a step's work is the host's own: there is nothing to tell apart.
    counts = plan.device == "cuda" and worker.contender == "hearth"
    steps = worker.advance(plan.host_steps, pause_s=_HOST_PAUSE * step_s if counts else 0.0)
    return steps[SETTLE:] if counts else []


def _alone_step_s(job: Job, plan: GPUPlan, log: Path) -> float:
    """The raw step of an engine that has the machine for itself, as a daemon's has."""
    with closing(Worker(job, log)) as worker:
        worker.advance(plan.steps)
        return _raw_step_s(worker)


def _raw_step_s(worker: Worker) -> float:
    windows = [worker.advance(_RAW_LAUNCHES, raw=True)[0] for _ in range(_RAW_WINDOWS)]
    return median(windows) / _RAW_LAUNCHES


def _log(logs: Path, case: GPUCase, name: str) -> Path:
    return logs / f"{case.name.replace('/', '-')}-{name.replace(' ', '-')}.log"
