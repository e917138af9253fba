"""`python -m tests.gpu.bench_engine MODEL`: the engine folder that `bench decode` would make.

A plan of the 0.6B shape takes nine minutes: where a machine is lent for ten at a time, the bench
needs a folder that is there already.
"""

import argparse
import sys
from pathlib import Path

from bench.decode.cases import ENGINES, engine_folder, export_options, random_source


def _say(stage: str, done: int, total: int) -> None:
    if done == total:
        sys.stderr.write(f"{stage}\n")


def main() -> None:
    """Make it, unless it is in the cache, and print where it lies."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", choices=["0.6b", "4b"])
    parser.add_argument("--engine", choices=ENGINES, default="tensorrt")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--builder-python", default=sys.executable)
    chosen = parser.parse_args()
    chosen.cache.mkdir(parents=True, exist_ok=True)
    source = random_source(chosen.model, chosen.cache, _say)
    options = export_options(chosen.engine, "float16", chosen.builder_python)
    sys.stdout.write(f"{engine_folder(source, chosen.cache, options, _say)}\n")


if __name__ == "__main__":
    main()
