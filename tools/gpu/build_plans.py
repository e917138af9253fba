"""`python -m tools.gpu.build_plans MODEL ENGINE`: an engine folder with its plan, also packed.

What `hearth export --backend tensorrt` does, for a machine where the builder lives in a Python of
its own; `ENGINE/model.plan.xz` is small enough to be carried to another machine of the same GPU.
"""

import argparse
import json
import lzma
import sys
from pathlib import Path

from hearth.runtime.engine_folder import PLAN_FILE
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.export.options import PlanOptions


def _draft(folder: Path, top_k: int, step: int, nodes: int) -> DraftOptions:
    return DraftOptions(
        folder=folder, drafting_top_k=top_k, drafting_step=step, max_verify_tree_size=nodes
    )


def main() -> None:
    """Export, pack and say what was built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--builder-python", default=sys.executable)
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--prefill-chunk", type=int, default=256)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--level", type=int)
    parser.add_argument("--timing-cache", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--max-lora-rank", type=int, default=0)
    parser.add_argument("--external-weights", action="store_true")
    parser.add_argument("--tree", type=int, nargs=3, default=(4, 3, 16), metavar=("K", "T", "N"))
    chosen = parser.parse_args()
    plan = PlanOptions(
        python=chosen.builder_python,
        version_compatible=True,
        optimization_level=chosen.level,
        timing_cache=chosen.timing_cache,
    )
    options = ExportOptions(
        dialect="classic",
        dtype="float16",
        capacity=chosen.capacity,
        prefill_chunk=chosen.prefill_chunk,
        max_batch=chosen.max_batch,
        plan=plan,
        draft=_draft(chosen.draft, *chosen.tree) if chosen.draft else None,
        max_lora_rank=chosen.max_lora_rank,
        external_weights=chosen.external_weights,
    )
    config = export_model(chosen.model, chosen.engine, options)
    packed = chosen.engine.with_name(f"{chosen.engine.name}-{PLAN_FILE}.xz")
    packed.write_bytes(lzma.compress((chosen.engine / PLAN_FILE).read_bytes(), preset=6))
    record = {name: one.bytes for name, one in config.files.items()}
    sys.stdout.write(json.dumps({"files": record, "packed": packed.stat().st_size}) + "\n")


if __name__ == "__main__":
    main()
