"""`hearth bench memory`: what an engine takes, part by part, against what was predicted."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Protocol

import msgspec

from bench.json_process import JsonProcess
from bench.memory_stages import OPTIONS, STAGES
from bench.process_memory import family_usage
from runtime.decoding.budget import predicted_parts
from runtime.decoding.deployment import DeploymentConfig, load_deployment
from runtime.device.cuda.context import open_context
from runtime.errors import HearthError

RATIO_AIM = 0.05
_TIMEOUT_S = 300.0


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

    @property
    def within_aim(self) -> bool:
        """Whether the sum was predicted within 5%."""
        ratio = self.predicted_over_measured
        return ratio is not None and abs(ratio - 1) <= RATIO_AIM


class Meter(Protocol):
    """Bytes that are in use where an engine lies."""

    def used(self) -> int:
        """Bytes now in use."""


class ProcessMeter:
    """The resident memory of a process and its children."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def used(self) -> int:
        """Resident bytes."""
        return family_usage(self._pid).rss_bytes


class GPUMeter:
    """The memory of the first GPU, of all its users together; nobody else may use it meanwhile."""

    def __init__(self) -> None:
        # A context of this process, whose own size stays the same.
        self._context = open_context()

    def used(self) -> int:
        """Bytes that are not free."""
        free, total = self._context.memory()
        return total - free


def measure_memory(engine: Path, log: Path) -> MemoryFigures:
    """Open `engine` in a process of its own and look after every stage; raises HearthError."""
    deployment = load_deployment(engine, OPTIONS)
    with closing(JsonProcess("bench.memory_main", [str(engine)], log)) as process:
        meter = GPUMeter() if deployment.base.device == "cuda" else ProcessMeter(process.pid)
        used = _stages(process, meter)
    return memory_figures(deployment, used)


def memory_figures(deployment: DeploymentConfig, used: Mapping[str, int]) -> MemoryFigures:
    """The figures for bytes in use after each stage, the first of them "start"."""
    predicted, device = predicted_parts(deployment), deployment.base.device
    parts: dict[str, PartFigures] = {}
    # The interpreter is part of the memory of a CPU, and not of that of a GPU.
    before = used["start"] if device == "cuda" else 0
    whole = used["steps"] - before
    for stage, names in STAGES.items():
        expected = sum(predicted.get(name, 0) for name in names)
        parts[stage] = _part(expected, used[stage] - before)
        before = used[stage]
    total = _part(sum(predicted.values()), whole)
    return MemoryFigures(
        device=device,
        parts=parts,
        predicted_mb=total.predicted_mb,
        measured_mb=total.measured_mb,
        predicted_over_measured=total.predicted_over_measured,
    )


def _stages(process: JsonProcess, meter: Meter) -> dict[str, int]:
    used: dict[str, int] = {}
    for stage in ("start", *STAGES):
        name = msgspec.json.decode(process.receive(_TIMEOUT_S), type=str)
        if name != stage:
            raise HearthError("internal", f"the engine cannot be opened, {name}")
        used[stage] = meter.used()
        process.send("go on")
    return used


def _part(predicted: int, measured: int) -> PartFigures:
    return PartFigures(
        predicted_mb=predicted / 1e6,
        measured_mb=measured / 1e6,
        predicted_over_measured=predicted / measured if measured > 0 else None,
    )
