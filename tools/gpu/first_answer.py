"""`python -m tools.gpu.first_answer ENGINE`: seconds from a daemon's start to its first token.

Three times: on two cores with an empty cache of compiled kernels, on two cores when they are
there, and on all cores. The difference of the first two is what compiling takes.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import msgspec

from hearth.bench.report import Record, print_fields
from hearth.daemon.own_daemon import OwnDaemon
from hearth_client import Client

CORES = 2
_FLAGS = ("--log-level", "warning")
_LIMIT_S = 150.0


class StartFigures(msgspec.Struct, kw_only=True):
    """Seconds from the start of the daemon's process to the first token at a client."""

    first_answer_s: float
    two_cores_s: float
    two_cores_compiling_s: float
    compiling_s: float


def first_answer_s(engine: Path, kernels: Path) -> float:
    """Seconds of one daemon with compiled kernels in `kernels`; raises Failure if it fails."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hearth-") as folder:
        daemon = OwnDaemon(Path(folder), engine, _FLAGS, environ={"HEARTH_CACHE": str(kernels)})
        try:
            daemon.wait_until_ready(_LIMIT_S)
            with Client(daemon.socket) as client:
                client.generate(prompt="switch the light on", max_tokens=1, ignore_eos=True).text()
            took = time.monotonic() - began
            daemon.stop()
        finally:
            daemon.kill()
    return took


def measure(engine: Path) -> StartFigures:
    """Start three daemons, one after the other."""
    everywhere = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder:
        os.sched_setaffinity(0, set(sorted(everywhere)[:CORES]))
        compiling, two = (first_answer_s(engine, Path(folder)) for _ in range(2))
        os.sched_setaffinity(0, everywhere)
        return StartFigures(
            first_answer_s=first_answer_s(engine, Path(folder)),
            two_cores_s=two,
            two_cores_compiling_s=compiling,
            compiling_s=compiling - two,
        )


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--name", default="start/kernels/4b")
    parser.add_argument("--record", type=Path)
    chosen = parser.parse_args()
    record = Record(chosen.record, ["python", "-m", "tools.gpu.first_answer", str(chosen.engine)])
    found = measure(chosen.engine)
    print_fields(chosen.name, found)
    record.keep({chosen.name: found})


if __name__ == "__main__":
    main()
