"""`python -m tools.compare_earlier RECORD EARLIER`: peers that were measured in another run.

Fills in, for each figure of `hearth bench decode --device cuda` in RECORD, the ratios to peers and
to ONNX Runtime that were not measured beside it, from the figures of EARLIER, and says so in its
notes. What EARLIER has of another type is left out.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hearth.bench.decode.cases import ENGINES
from hearth.bench.report import Recorded, read_record, rounded, write_record
from hearth.daemon.cli.errors import run_and_exit


def compared(figures: Mapping[str, Any], earlier: Recorded, file: str) -> dict[str, Any]:
    """Figures by key, those of decode steps with the ratios to what `file` has of their case."""
    return {
        key: _compared(key, found, earlier, file) if key.partition("/")[0] in ENGINES else found
        for key, found in figures.items()
    }


def _compared(key: str, found: dict[str, Any], earlier: Recorded, file: str) -> dict[str, Any]:
    theirs = f"ort-cuda/{key.partition('/')[2]}"
    old = earlier.figures.get(theirs, {})
    if old.get("dtype", found["dtype"]) != found["dtype"]:
        return found
    peers = {name: old.get(f"{name}_ms") for name in ("transformers", "torch_compile")}
    peers["ort_cuda"] = None if key == theirs else old.get("step_ms")
    taken = {name: ms for name, ms in peers.items() if ms and found.get(f"vs_{name}") is None}
    if not taken:
        return found
    run = earlier.run_of(theirs)
    origin = f"{file}, {run.date}, commit {run.commit}"
    return {
        **found,
        **{f"{name}_ms": ms for name, ms in taken.items()},
        **{f"vs_{name}": ms / found["step_ms"] for name, ms in taken.items()},
        "notes": [*found["notes"], f"of another run ({origin}): {', '.join(taken)}"],
    }


def main() -> int:
    """Compare, and write the record; raises `invalid_value` where a file holds no figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("earlier", type=Path)
    chosen = parser.parse_args()
    record, earlier = read_record(chosen.record), read_record(chosen.earlier)
    if record is None or earlier is None:
        parser.error(f"there is no {chosen.earlier if record else chosen.record}")
    figures = rounded(compared(record.figures, earlier, chosen.earlier.name))
    write_record(chosen.record, msgspec.structs.replace(record, figures=figures))
    return 0


if __name__ == "__main__":
    run_and_exit(main)
