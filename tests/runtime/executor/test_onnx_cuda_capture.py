from collections.abc import Iterator

import pytest

from runtime.device.cuda.context import CudaContext
from runtime.device.cuda.cuda_device import CudaDevice
from runtime.device.cuda.driver import CudaDriver
from runtime.errors import HearthError
from runtime.executor.onnx_cuda_capture import capture_run
from tests.runtime.device.cuda.fake_driver import CUresult, _Names
from tests.runtime.device.cuda.resource_driver import ResourceDriver
from tests.runtime.device.cuda.test_tree_launches import NoCompiler


class GraphDriver(ResourceDriver):
    """Every captured graph has one node of the type `node`."""

    CUgraphNodeType = CUmemorytype = _Names()

    def __init__(self, node: str = "CU_GRAPH_NODE_TYPE_KERNEL") -> None:
        super().__init__()
        self.results["cuGraphGetNodes"] = (["node"], 1)
        self.results["cuGraphNodeGetType"] = (node,)

    def graphs(self) -> list[str]:
        return sorted(kind for kind, _ in self.alive if kind in {"graph", "executable"})


@pytest.fixture
def api(request: pytest.FixtureRequest) -> GraphDriver:
    return GraphDriver(*getattr(request, "param", ()))


@pytest.fixture
def device(api: GraphDriver) -> Iterator[CudaDevice]:
    made = CudaDevice(CudaContext(CudaDriver(api)), NoCompiler())
    yield made
    made.close()
    assert (api.alive, api.misuse) == ({}, [])


def test_what_is_queued_becomes_a_graph(api: GraphDriver, device: CudaDevice) -> None:
    graph = capture_run(device, lambda: None)
    assert api.graphs() == ["executable", "graph"]
    graph.close()


@pytest.mark.parametrize("api", [("CU_GRAPH_NODE_TYPE_HOST",)], indirect=True)
def test_a_graph_that_asks_the_host_is_refused_and_freed(
    api: GraphDriver, device: CudaDevice
) -> None:
    with pytest.raises(HearthError, match="1 nodes of the step need the host") as caught:
        capture_run(device, lambda: None)
    assert caught.value.code == "engine_incompatible"
    assert api.graphs() == []


def test_a_graph_whose_nodes_cannot_be_asked_for_is_freed(
    api: GraphDriver, device: CudaDevice
) -> None:
    def fail_next() -> None:
        # Behind it come the end of the capture and the graph's instantiation.
        api.failing_call, api.status = api.count + 3, CUresult.CUDA_ERROR_INVALID_VALUE

    with pytest.raises(HearthError, match="cuGraphGetNodes"):
        capture_run(device, fail_next)
    assert api.graphs() == []
