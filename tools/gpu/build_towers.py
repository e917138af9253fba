"""`python -m tools.gpu.build_towers FOLDER`: plans of small towers for tests/gpu/test_tower.py.

`--builder-python` names the Python that has TensorRT, as `hearth export` has it.
"""

import argparse
import sys
import time
from pathlib import Path

from hearth.runtime.export import ExportOptions
from hearth.runtime.export.options import PlanOptions
from hearth.runtime.export.tensorrt.plan import settle_options
from hearth.runtime.export.vision.write import write_vision
from tests.vision_models import FAMILIES, write_vision_model


def main() -> None:
    """Build a tower of each family in both types, and say what was built and how long it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--builder-python", default=sys.executable)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--rtx", action="store_true", help="by TensorRT-RTX")
    chosen = parser.parse_args()
    plan = PlanOptions(python=chosen.builder_python, version_compatible=True)
    if chosen.rtx:
        plan = PlanOptions(python=chosen.builder_python, builder="tensorrt_rtx")
    for family in chosen.family or FAMILIES:
        source = write_vision_model(chosen.folder / "models" / family, family)
        for dtype in ("float16", "float32"):
            began, target = time.monotonic(), chosen.folder / f"{family}-{dtype}"
            target.mkdir()
            options = settle_options(ExportOptions(dtype=dtype, plan=plan))
            config = write_vision(source, target, options)
            made = config and (config.dialect, config.plan and config.plan.tensorrt_version)
            sys.stdout.write(f"{target.name}: {made}, {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
