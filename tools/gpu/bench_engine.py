"""`python -m tools.gpu.bench_engine MODEL`: the files that `bench decode` would make.

A plan of the 0.6B shape takes nine minutes: where a machine is lent for ten at a time, the bench
needs a folder that is there already.
"""

import argparse
import sys
from pathlib import Path

from hearth.bench.decode.cases import ENGINES
from hearth.bench.decode.command import gpu_models
from hearth.bench.decode.gpu import GPUPlan


def main() -> None:
    """Make them, unless they are in the cache, and print where they lie."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", choices=["0.6b", "4b"])
    parser.add_argument("--engine", choices=ENGINES, action="append", default=[])
    parser.add_argument("--llama", action="store_true", help="llama.cpp's files beside them")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--builder-python", default=sys.executable)
    chosen = parser.parse_args()
    chosen.cache.mkdir(parents=True, exist_ok=True)
    plan = GPUPlan(
        engines=tuple(chosen.engine or ["tensorrt"]),
        peers=("llama_cpp",) if chosen.llama else (),
        builder_python=chosen.builder_python,
    )
    made = gpu_models(chosen.model, plan, chosen.cache)
    for path in (*made.folders.values(), *made.ggufs.values()):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
