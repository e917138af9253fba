"""`python -m tools.gpu.step_times ENGINE`: graph nodes and time of every decode step of a plan."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.gpu.plan_driver import PlanDriver
from tools.gpu.graph_times import graph_times


def step_time(driver: PlanDriver, batch: int, profile: int) -> dict[str, Any]:
    """Nodes and times of the captured step of a batch."""
    dims = driver.dims(batch, 1)
    driver.engine.use_profile(profile, driver.stream)
    graph = driver.engine.capture(driver.bindings(dims), driver.stream)
    found = graph_times(graph, driver.context, driver.stream)
    layers = driver.config.num_decoder_layers
    return {"batch": batch, "nodes_per_layer": round(found["nodes"] / layers, 1), **found}


def main(folder: Path) -> None:
    """Print one JSON line a decode batch."""
    driver = PlanDriver(folder)
    for profile, batch in enumerate(driver.config.static_decode_batches, start=1):
        sys.stdout.write(json.dumps(step_time(driver, batch, profile)) + "\n")
    driver.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
