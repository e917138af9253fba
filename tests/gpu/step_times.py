"""`python -m tests.gpu.step_times ENGINE`: graph nodes and time of every decode step of a plan."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from runtime.device.cuda.stream import CudaEvent
from tests.gpu.plan_driver import PlanDriver

LAUNCHES = 300
WARM_UP = 20


def step_time(driver: PlanDriver, batch: int, profile: int) -> dict[str, Any]:
    """Nodes of the captured step, and the median over single launches in milliseconds."""
    dims = driver.dims(batch, 1)
    driver.engine.use_profile(profile, driver.stream)
    graph: Any = driver.engine.capture(driver.bindings(dims), driver.stream)
    begin, end = (CudaEvent(driver.context, timing=True) for _ in range(2))
    times = []
    for number in range(WARM_UP + LAUNCHES):
        begin.record(driver.stream)
        graph.launch(driver.stream)
        end.record(driver.stream)
        driver.stream.synchronize()
        if number >= WARM_UP:
            times.append(end.elapsed_ms(begin))
    nodes = graph.nodes
    graph.close()
    return {
        "batch": batch,
        "nodes": nodes,
        "nodes_per_layer": round(nodes / driver.config.num_decoder_layers, 1),
        "step_ms": round(statistics.median(times), 4),
    }


def main(folder: Path) -> None:
    """Print one JSON line a decode batch."""
    driver = PlanDriver(folder)
    for profile, batch in enumerate(driver.config.static_decode_batches, start=1):
        sys.stdout.write(json.dumps(step_time(driver, batch, profile)) + "\n")
    driver.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
