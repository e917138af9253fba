"""`hearth bench memory`: what an engine takes, part by part, against what was predicted."""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import click
import msgspec

from hearth.bench.child_process import ChildProcess, family_usage
from hearth.bench.memory_stages import STAGES, MemoryJob
from hearth.bench.report import (
    Record,
    judged,
    log_folder,
    note,
    print_cases,
    publish,
    record_option,
)
from hearth.bench.toy_daemon import engine_option, given_or_toy
from hearth.daemon.cli.options import json_option
from hearth.runtime.device.cuda.context import open_context
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.predicted import predict_memory

RATIO_AIM = 0.05
_TIMEOUT_S = 300.0
_RESIDENT = (
    "On the CPU the parts are not comparable one by one: what a part reserves becomes resident "
    'when a step first uses it, and is measured among "steps". Compare the sums.'
)


class PartFigures(msgspec.Struct, kw_only=True):
    """Megabytes of 10^6 bytes; the ratio is None where nothing was taken."""

    predicted_mb: float
    measured_mb: float
    predicted_over_measured: float | None


class MemoryFigures(msgspec.Struct, kw_only=True):
    """An engine's memory by part and in all, on its device."""

    device: str
    parts: dict[str, PartFigures]
    predicted_mb: float
    measured_mb: float
    predicted_over_measured: float | None
    dtype: str = ""

    @property
    def within_aim(self) -> bool:
        """True where the sum was predicted within 5%."""
        ratio = self.predicted_over_measured
        return ratio is not None and abs(ratio - 1) <= RATIO_AIM


@click.command()
@engine_option("a toy")
@click.option(
    "--prefix-cache-bytes",
    type=click.IntRange(min=0),
    default=0,
    metavar="BYTES",
    help="Also fill a prefix cache of BYTES; 0 for none.  [0]",
)
@click.option(
    "--name", default="", metavar="NAME", help="The key of these figures in a record.  [memory]"
)
@record_option
@json_option
def memory(
    engine: Path | None, prefix_cache_bytes: int, name: str, record: Record, *, as_json: bool
) -> int:
    """Compare the memory that hearth check predicts with what an engine takes, part by part.

    On a GPU by its free memory, where nobody else may work meanwhile, and the exit code is 1 when
    the sum is off by more than 5%; on the CPU by resident memory, which depends on what is used.
    """
    if name and record.file is None:
        raise click.UsageError("--name is for --record")
    with given_or_toy(engine) as folder:
        job = MemoryJob(str(folder), prefix_cache_bytes)
        found = measure_memory(job, log_folder() / "memory.log")
    publish(found, lambda: _print(found), as_json=as_json)
    record.keep({name or "memory": found})
    off = found.device == "cuda" and not found.within_aim
    return judged(["the prediction is off by more than 5%"] if off else [])


def _print(found: MemoryFigures) -> None:
    fields = "predicted_mb measured_mb predicted_over_measured"
    parts = {**found.parts, "all": found}
    print_cases(f"Memory of an engine on {found.device}", fields, parts)
    if found.device == "cpu":
        note(_RESIDENT)


def measure_memory(job: MemoryJob, log: Path) -> MemoryFigures:
    """Do `job` in a process of its own and look after every stage; raises HearthError."""
    deployment = job.load()
    used_on_gpu = gpu_meter() if deployment.base.device == "cuda" else None
    used: dict[str, int] = {}
    with closing(ChildProcess("hearth.bench.memory_stages", job, log)) as process:
        for stage in ("start", *STAGES):
            name = process.receive(str, _TIMEOUT_S)
            if name != stage:
                raise HearthError("internal", f"the engine is at {name} in place of {stage}")
            used[stage] = used_on_gpu() if used_on_gpu else family_usage(process.pid).rss_bytes
            process.send("go on")
    return memory_figures(deployment, used)


def gpu_meter() -> Callable[[], int]:
    """Counts the bytes of the first GPU that are in use, by all: nobody else may work there."""
    # A context of this process, whose own size stays the same.
    context = open_context()

    def used() -> int:
        free, total = context.memory()
        return total - free

    return used


def memory_figures(deployment: DeploymentConfig, used: Mapping[str, int]) -> MemoryFigures:
    """The figures for bytes in use after each stage, the first of them "start"."""
    device = deployment.base.device
    # On the CPU a vision tower and the daemon itself lie in other processes.
    here = deployment._replace(tower=None) if device == "cpu" else deployment
    predicted = predict_memory(here).device
    predicted.pop("daemon_process", None)
    parts: dict[str, PartFigures] = {}
    # The interpreter is part of the memory of a CPU, and not of that of a GPU.
    before = used["start"] if device == "cuda" else 0
    whole = used["steps"] - before
    for stage, names in STAGES.items():
        expected = sum(predicted.get(name, 0) for name in names)
        parts[stage] = _part(expected, used[stage] - before)
        before = used[stage]
    total = _part(sum(predicted.values()), whole)
    whole_and_type = {**msgspec.structs.asdict(total), "dtype": deployment.base.dtype}
    return MemoryFigures(device=device, parts=parts, **whole_and_type)


def _part(predicted: int, measured: int) -> PartFigures:
    return PartFigures(
        predicted_mb=predicted / 1e6,
        measured_mb=measured / 1e6,
        predicted_over_measured=predicted / measured if measured > 0 else None,
    )
