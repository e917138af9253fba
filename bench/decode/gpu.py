"""`hearth bench decode --device cuda`: the GPU engines beside peers and the read bandwidth."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
from msgspec import structs

from hearth.bench.contenders.contender import Device, Job
from hearth.bench.contenders.gguf_model import GGUFType
from hearth.bench.contenders.worker import Worker
from hearth.bench.decode.cases import (
    ENGINES,
    PEERS,
    SHORT_CONTEXT,
    DType,
    GPUCase,
    GPUEngine,
    Peer,
    step_bytes,
)
from hearth.bench.decode.contest import Contest, prompt_ids
from hearth.bench.decode.gpu_figures import (
    SETTLE,
    GPUFigures,
    GPUTimes,
    gpu_figures,
    llama_name,
    step_seconds,
)
from hearth.bench.toy_daemon import connected
from hearth.daemon.cli.errors import Failure
from hearth.daemon.own_daemon import own_daemon
from hearth.runtime.config import load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.files import cache_folder
from hearth.runtime.text.tokenizer import Tokenizer
from hearth_client import AsyncClient

FLOOR = "read bandwidth"
_WARM_UP = 5
_FLOOR_PASSES = 10
_RAW_LAUNCHES = 50
_RAW_WINDOWS = 5
# A step must be over before the next is asked for, when the host's own time is wanted.
_HOST_PAUSE = 2.0
_ACTOR_PROMPT = "switch the light on"
_ACTOR_TOKENS = 256
_ACTOR_SETTLE = 16
_ACTOR_FLAGS = ("--fill-wait-ms", "500", "--no-verify", "--log-level", "warning")
Arrival = tuple[float, int]
"""End of a delta's step, in seconds, and how many tokens the delta has."""


class GPUPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Choices and amounts of a run: `rounds` times `steps` steps of each contender, in turns.

    Behind each round come `host_steps` more, for the host's own time of an engine. `ready` names
    engine folders that exist, by `engine/model`. `device` "cpu" is for tests: the same way
    without a GPU. A pass of the floor reads `floor_bytes`. `daemons` are the engines that are also
    measured through a daemon.
    """

    engines: tuple[GPUEngine, ...] = ENGINES
    peers: tuple[Peer, ...] = PEERS
    dtype: DType = "float16"
    builder_python: str = sys.executable
    ready: dict[str, Path] = {}
    quick: bool = False
    device: Device = "cuda"
    rounds: int = 7
    steps: int = 24
    host_steps: int = 7
    floor_bytes: int = 32 << 30
    daemons: tuple[GPUEngine, ...] = ENGINES

    @property
    def total_steps(self) -> int:
        """Steps of a contender, without its prompt."""
        return _WARM_UP + self.rounds * (self.steps + self.host_steps)


class GPUModels(msgspec.Struct, frozen=True):
    """The same weights for everyone: the peers', the engines' and llama.cpp's by stored type."""

    source: Path
    folders: Mapping[GPUEngine, Path]
    ggufs: Mapping[GGUFType, Path] = {}


def measure_gpu(
    case: GPUCase, models: GPUModels, plan: GPUPlan, contest: Contest
) -> dict[str, GPUFigures]:
    """Figures by engine; an engine or peer that cannot run here is noted and left out.

    A contender that fails later on ends the run: what it has disturbed is not known. A daemon
    that fails, when the others have ended, is noted.
    """
    folders = models.folders
    jobs = _jobs(case, models, plan)
    with closing(contest):
        contest.invite(jobs)
        engines = [name for name in folders if name in contest.workers]
        if not engines:
            return {}
        times = _take_turns(contest, plan)
        for name in engines:
            times.raw[name] = _raw_step_s(contest.workers[name])
    # Rows of a daemon have a context of their own, whatever the case.
    daemons = plan.daemons if case.context == SHORT_CONTEXT else ()
    for name in (one for one in engines if one in daemons):
        contest.say(f"{name} through a daemon")
        try:
            # Launches of the context in the middle of the daemon's steps: more slots take longer.
            beside = prompt_ids(actor_context(folders[name]) - plan.steps)
            job = structs.replace(jobs[name], prompt=beside)
            times.alone[name] = _alone_step_s(job, plan, contest.log(name))
            times.actor[name] = actor_step_s(folders[name], case.batch)
        except (HearthError, Failure) as error:
            contest.remark(f"{name} was not measured through a daemon: {error}")
    return {
        name: gpu_figures(
            name,
            times,
            case=case,
            step_bytes=step_bytes(load_config(folders[name]), case.batch, case.context),
            dtype=plan.dtype,
            notes=contest.notes,
        )
        for name in engines
    }


def _jobs(case: GPUCase, models: GPUModels, plan: GPUPlan) -> dict[str, Job]:
    # The context is that of the middle of the steps that count.
    before = plan.total_steps - plan.rounds * (plan.steps + plan.host_steps) // 2
    common = Job(
        contender="hearth",
        prompt=prompt_ids(case.context - before),
        steps=plan.total_steps,
        batch=case.batch,
        capture=True,
        device=plan.device,
        precision=plan.dtype,
        capacity=case.slots,
    )
    path = str(models.source)
    peers = {
        "transformers": structs.replace(common, contender="static_cache", path=path),
        "torch_compile": structs.replace(common, contender="torch_compile", path=path),
    }
    llama = structs.replace(common, contender="llama_cpp")
    return {
        **{name: structs.replace(common, path=str(f)) for name, f in models.folders.items()},
        **{name: job for name, job in peers.items() if name in plan.peers},
        **{
            llama_name(kind): structs.replace(llama, path=str(f))
            for kind, f in models.ggufs.items()
        },
        FLOOR: Job(contender="gpu_floor", device=plan.device, bytes=plan.floor_bytes),
    }


def _take_turns(contest: Contest, plan: GPUPlan) -> GPUTimes:
    models = dict(contest.workers)
    reader = models.pop(FLOOR, None)
    times = GPUTimes(rounds={name: [] for name in models})
    for worker in models.values():
        worker.advance(_WARM_UP)
    for _ in contest.rounds(plan.rounds):
        for name, worker in models.items():
            times.rounds[name].append(worker.advance(plan.steps))
            steps = _host_steps(worker, plan, step_seconds(times.rounds[name][-1:]))
            if steps:
                times.host.setdefault(name, []).extend(steps)
        if reader is not None:
            times.floor += reader.advance(_FLOOR_PASSES)
            times.floor_bytes = reader.job.bytes
    return times


def _host_steps(worker: Worker, plan: GPUPlan, step_s: float) -> list[float]:
    """Seconds of steps that wait for nothing; a peer has none, and takes as many steps."""
    # On a CPU a step's work is the host's own: there is nothing to tell apart.
    counts = plan.device == "cuda" and worker.job.contender == "hearth"
    steps = worker.advance(plan.host_steps, pause_s=_HOST_PAUSE * step_s if counts else 0.0)
    return steps[SETTLE:] if counts else []


def _alone_step_s(job: Job, plan: GPUPlan, log: Path) -> float:
    """The raw step of an engine that has the machine for itself, as a daemon's has."""
    with closing(Worker(job, log).ready()) as worker:
        worker.advance(plan.steps)
        return _raw_step_s(worker)


def _raw_step_s(worker: Worker) -> float:
    windows = [worker.advance(_RAW_LAUNCHES, raw=True)[0] for _ in range(_RAW_WINDOWS)]
    return median(windows) / _RAW_LAUNCHES


def actor_step_s(engine: Path, batch: int, tokens: int = _ACTOR_TOKENS) -> float:
    """Median seconds from the end of a step in the executor to the end of the next.

    `batch` clients fill one batch; the steps before all of them are in it are left out.
    """
    import uvloop  # noqa: PLC0415 - the clients of a daemon alone have a use for it

    # Kernels that the contenders compiled need not be compiled again.
    with own_daemon(engine, _ACTOR_FLAGS, environ={"HEARTH_CACHE": str(cache_folder())}) as daemon:
        rows = uvloop.run(_arrivals(daemon.socket, batch, tokens))
        daemon.stop()
    rows = [row[_ACTOR_SETTLE:] for row in rows]
    if len({ended for row in rows for ended, _ in row}) > tokens:
        raise HearthError("internal", "the rows of the measurement were not in one batch")
    return median(step for row in rows for step in step_times(row))


def actor_context(engine: Path, tokens: int = _ACTOR_TOKENS) -> int:
    """Tokens of a row in the middle of the steps that `actor_step_s` measures."""
    prompt = Tokenizer.open(engine).encode_pairs([("user", _ACTOR_PROMPT)])
    return len(prompt) + (_ACTOR_SETTLE + tokens) // 2


def step_times(row: Sequence[Arrival]) -> list[float]:
    """Seconds of the steps behind a row's deltas; one that tells of several is left out."""
    return [end - before for (before, _), (end, tokens) in pairwise(row) if tokens == 1]


async def _arrivals(socket: Path, batch: int, tokens: int) -> list[list[Arrival]]:
    async with connected(socket, batch) as clients:
        return await asyncio.gather(*(_arrivals_of(client, tokens) for client in clients))


async def _arrivals_of(client: AsyncClient, tokens: int) -> list[Arrival]:
    # A model of random weights repeats itself, and lookup would speculate: plain steps are wanted.
    stream = await client.generate(
        _ACTOR_PROMPT, max_tokens=tokens, ignore_eos=True, timestamps=True, speculation=False
    )
    return [(one.ended, len(one.tokens)) async for one in stream if one.ended is not None]
