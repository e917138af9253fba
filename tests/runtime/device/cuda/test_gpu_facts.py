from typing import Any

import pytest

from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.gpu_facts import GpuFacts, largest_cluster
from tests.runtime.device.cuda.fake_driver import CUresult, FakeDriver

SHARED = 232_448


class ClusterDriver(FakeDriver):
    """A driver that has room for so many clusters of each size, and refuses other sizes."""

    def __init__(self, room: dict[int, int], capability: int = 9) -> None:
        super().__init__()
        self.room = room
        self.results["cuDeviceGetAttribute"] = (capability,)
        self.results["cuModuleLoadData"] = ("module",)
        self.results["cuModuleGetFunction"] = ("function",)

    def cuOccupancyMaxActiveClusters(  # noqa: N802 - the library's name
        self, function: str, config: Any
    ) -> tuple[CUresult, int]:
        (attribute,) = config.attrs
        size = attribute.value.clusterDim.x
        assert (function, config.gridDimX, config.sharedMemBytes) == ("function", size, SHARED)
        known = size in self.room
        return CUresult.CUDA_SUCCESS if known else CUresult.CUDA_ERROR_INVALID_VALUE, (
            self.room.get(size, 0)
        )


@pytest.mark.parametrize(
    ("room", "largest"),
    [({8: 15, 4: 32, 2: 66}, 8), ({8: 0, 4: 3, 2: 7}, 4), ({2: 1}, 2), ({8: 0, 4: 0, 2: 0}, 1)],
)
def test_the_largest_cluster_is_one_that_the_driver_finds_room_for(
    room: dict[int, int], largest: int
) -> None:
    api = ClusterDriver(room)
    assert largest_cluster(CudaContext(CudaDriver(api)), SHARED) == largest
    assert ("cuModuleUnload", "module") in api.calls


def test_gpus_before_hopper_have_no_clusters() -> None:
    api = ClusterDriver({8: 15}, capability=8)
    assert largest_cluster(CudaContext(CudaDriver(api)), SHARED) == 1
    assert "cuModuleLoadData" not in api.names()


def test_facts_are_those_of_the_gpu() -> None:
    api = FakeDriver()
    api.results["cuModuleLoadData"] = ("module",)
    api.results["cuModuleGetFunction"] = ("function",)
    api.results["cuOccupancyMaxActiveClusters"] = (1,)
    facts = GpuFacts.of(CudaContext(CudaDriver(api)))
    assert facts == ((9, 9), 9, 9, 9, 8)
    asked = [call[1] for call in api.calls if call[0] == "cuDeviceGetAttribute"]
    assert asked[-2:] == [
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    ]
    assert facts.dependent
    assert not facts._replace(capability=(8, 9)).dependent
