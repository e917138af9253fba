"""`python -m tools.gpu.kernel_profile [--record FILE]`: kernels of single steps, by ncu.

Each kernel of a model of three layers runs alone, with cold caches: sums are longer than a step.
The figures go to a record of profiles by key, `step/MODEL/ROWS TOKENS FILLED SLOTS`.
"""

import argparse
import csv
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from hearth.bench.report import Record

TIMES, ADAPTERS = "tools.gpu.kernel_times", "tools.gpu.kernel_adapter_times"
RUNS = ((TIMES, "0.6b"), (TIMES, "0.6b-int4"), (ADAPTERS, "0.6b"), (ADAPTERS, "4b"))
LIMIT_S = 120.0
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_STALLS = ("long_scoreboard", "short_scoreboard", "barrier", "wait", "membar", "math_pipe_throttle")
METRICS = {
    "us": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "shared_kb": "launch__shared_mem_per_block_allocated",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "memory": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    **{name: _STALL.format(name) for name in _STALLS},
}
_SCALES = {"ns": 1e-3, "us": 1.0, "usecond": 1.0, "nsecond": 1e-3, "ms": 1e3, "byte/block": 1e-3}
_PROFILED = re.compile(r'==PROF== Profiling "(?P<name>[^"]+)" - (?P<id>\d+)')
Kernel = dict[str, Any]


def command(ncu: str, module: str, name: str, report: Path) -> list[str]:
    """One run of ncu over a module's steps; it lists each kernel only with a report."""
    metrics = ["--metrics", ",".join(METRICS.values())]
    flags = ["--profile-from-start", "off", "--clock-control", "none"]
    written = ["--force-overwrite", "--export", str(report)]
    return [ncu, *flags, *metrics, *written, sys.executable, "-m", module, "--profile", name]


def listing(ncu: str, report: Path) -> list[str]:
    """The command that prints a report's kernels."""
    return [ncu, "--import", str(report), "--csv", "--page", "raw"]


def steps_of(output: str) -> dict[str, list[Kernel]]:
    """The kernels of each step by its sizes, from what the program and ncu printed in turns."""
    lines = output.splitlines()
    table = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.reader(line for line in lines[table:] if line.startswith('"'))
    names, units = next(rows, []), next(rows, [])
    kernels = {}
    for row in rows:
        known = dict(zip(names, row, strict=True))
        unit = dict(zip(names, units, strict=True))
        kernels[known["ID"]] = {
            "kernel": f"{known['Kernel Name']} {known['Grid Size']}".replace(", ", "x"),
            **{
                key: _number(known.get(name, ""), unit.get(name, ""))
                for key, name in METRICS.items()
            },
        }
    found: dict[str, list[Kernel]] = {}
    step = ""
    for line in lines[:table]:
        if line.startswith("step "):
            step = line.removeprefix("step ")
        elif (seen := _PROFILED.search(line)) and seen["id"] in kernels:
            found.setdefault(step, []).append(kernels[seen["id"]])
    return found


def _number(text: str, unit: str) -> float | None:
    try:
        return float(text.replace(",", "")) * _SCALES.get(unit, 1.0)
    except ValueError:
        return None


def summary(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Kernels of a step by name, blocks and registers: how many, and the mean of each figure."""
    by_name: dict[str, list[Kernel]] = {}
    for one in kernels:
        # Products of one name and as many blocks are told apart by their registers.
        by_name.setdefault(f"{one['kernel']} r{one['registers'] or 0:.0f}", []).append(one)
    return {
        "kernels": len(kernels),
        "kernels_us": sum(one["us"] or 0.0 for one in kernels),
        "by_name": {
            name: {"count": len(each)}
            | {key: fmean(values) for key in METRICS if (values := _known(each, key))}
            for name, each in by_name.items()
        },
    }


def _known(kernels: Sequence[Kernel], key: str) -> list[float]:
    return [one[key] for one in kernels if one[key] is not None]


def profiled(line: Sequence[str]) -> str:
    """Output of a run of ncu and its program, or what came of it before it was out of time."""
    with subprocess.Popen(  # noqa: S603 - our own program
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0]


def profile(ncu: str, module: str, name: str) -> str:
    """Output of a module's steps and ncu in turns, and behind it the table of their kernels."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "steps.ncu-rep")
        told = profiled(command(ncu, module, name, report))
        return f"{told}\n{profiled(listing(ncu, report))}" if report.exists() else told


def figures_of(module: str, name: str, output: str) -> dict[str, Any]:
    """The figures of a run by key."""
    kind = f"{name}-adapter" if module == ADAPTERS else name
    return {f"step/{kind}/{sizes}": summary(kernels) for sizes, kernels in steps_of(output).items()}


def tell(figures: Mapping[str, Any]) -> None:
    """Print what was found."""
    for key, one in figures.items():
        sys.stdout.write(f"{key}: {one['kernels']} kernels, {one['kernels_us']:.1f} us\n")
        for kernel, means in one["by_name"].items():
            each = " ".join(f"{name} {value:.4g}" for name, value in means.items())
            sys.stdout.write(f"  {kernel}: {each}\n")
    sys.stdout.flush()


def main() -> int:
    """Profile, print, record; the exit code is 1 when a run gave no kernels."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--record", type=Path)
    chosen = parser.parse_args()
    record = Record(chosen.record, ["python", "-m", "tools.gpu.kernel_profile"])
    code = 0
    for module, name in RUNS:
        output = profile(chosen.ncu, module, name)
        figures = figures_of(module, name, output)
        tell(figures)
        if not figures:
            code = 1
            sys.stdout.write(f"{module} {name}: no kernels\n{output[-1500:]}\n")
        record.keep(figures)
    return code


if __name__ == "__main__":
    sys.exit(main())
