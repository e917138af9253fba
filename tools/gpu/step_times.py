"""`python -m tools.gpu.step_times ENGINE`: graph nodes and time of every decode step of a plan."""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.stream import CudaEvent, CudaStream
from tests.gpu.plan_driver import PlanDriver

LAUNCHES = 200
WARM_UP = 20


def graph_times(graph: Any, context: CudaContext, stream: CudaStream) -> dict[str, Any]:
    """Launch a captured step again and again, and close it.

    `step_ms` is the median over single launches, `in_a_row_ms` what one takes where the next one
    waits for it already, `graph_host_us` the host's time to launch it.
    """
    begin, end = (CudaEvent(context, timing=True) for _ in range(2))
    times, hosts = [], []
    for _ in range(WARM_UP + LAUNCHES):
        begin.record(stream)
        host = time.perf_counter()
        graph.launch(stream)
        hosts.append(time.perf_counter() - host)
        end.record(stream)
        stream.synchronize()
        times.append(end.elapsed_ms(begin))
    begin.record(stream)
    for _ in range(LAUNCHES):
        graph.launch(stream)
    end.record(stream)
    stream.synchronize()
    found = {
        "nodes": graph.nodes,
        "step_ms": round(statistics.median(times[WARM_UP:]), 4),
        "in_a_row_ms": round(end.elapsed_ms(begin) / LAUNCHES, 4),
        "graph_host_us": round(statistics.median(hosts) * 1e6, 1),
    }
    graph.close()
    return found


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
