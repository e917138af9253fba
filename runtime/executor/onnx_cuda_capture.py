from collections.abc import Callable

from runtime.device.cuda.context import CudaContext
from runtime.device.cuda.cuda_device import CudaDevice
from runtime.device.cuda.graph import CudaGraph
from runtime.errors import HearthError
from runtime.undo import undoing


def capture_run(device: CudaDevice, run: Callable[[], None]) -> CudaGraph:
    """The work that `run` queues on the device's stream, as a graph.

    Raises `engine_incompatible` when a replay would read or call the host: what ONNX Runtime
    left there is gone by then.
    """
    with device.capture() as capture:
        run()
    with undoing() as undo:
        undo.callback(capture.graph.close)
        from_host = host_nodes(device.context, capture.graph)
        if from_host:
            raise HearthError(
                "engine_incompatible",
                f"{from_host} nodes of the step need the host, so it cannot be replayed: export "
                "the model again",
                "operators",
            )
    return capture.graph


def host_nodes(context: CudaContext, graph: CudaGraph) -> int:
    """How many nodes of a graph copy from or to host memory, or call a host function."""
    driver = context.driver
    types, places = driver.api.CUgraphNodeType, driver.api.CUmemorytype
    count = 0
    for node in graph.each_node():
        kind = driver.call("cuGraphNodeGetType", node)
        if kind == types.CU_GRAPH_NODE_TYPE_HOST:
            count += 1
        elif kind == types.CU_GRAPH_NODE_TYPE_MEMCPY:
            copy = driver.call("cuGraphMemcpyNodeGetParams", node)
            host = places.CU_MEMORYTYPE_HOST
            count += host in (copy.srcMemoryType, copy.dstMemoryType)
    return count
