from typing import Any, NamedTuple

from hearth.runtime.device.cuda.context import FIRST_WITH_DEPENDENTS, CudaContext
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.launch import launch_config

_FIRST = (9, 0)
LARGEST = 8
"""The most blocks of a cluster that our kernels have."""
_SIZES = (LARGEST, 4, 2)
_THREADS = 256
_KERNEL = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry empty() { ret; }\n\0"


class GpuFacts(NamedTuple):
    """Limits of a GPU that set the shapes of kernels; shared memory in bytes.

    `shared_per_block` is the most that a block may ask for, static memory included, and
    `largest_cluster` the number of blocks of that size in the largest cluster, 1 without clusters.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    largest_cluster: int = 1

    @classmethod
    def of(cls, context: CudaContext) -> "GpuFacts":
        """Read the limits of a context's GPU."""
        shared = context.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        return cls(
            context.properties.compute_capability,
            context.properties.multiprocessors,
            shared,
            context.attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            largest_cluster(context, shared),
        )

    @property
    def dependent(self) -> bool:
        """True if the GPU has programmatic dependent launch."""
        return self.capability >= FIRST_WITH_DEPENDENTS


def largest_cluster(context: CudaContext, shared_bytes: int) -> int:
    """Return the size of the largest cluster, up to 8 blocks of `shared_bytes` each.

    The size is 1 without clusters: before compute capability 9.0, and on a MIG slice or share of a
    GPU without adjacent multiprocessors.
    """
    if context.properties.compute_capability < _FIRST:
        return 1
    driver = context.driver
    module = driver.call("cuModuleLoadData", _KERNEL)
    try:
        function = driver.call("cuModuleGetFunction", module, b"empty")
        most = driver.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.call("cuFuncSetAttribute", function, most, shared_bytes)
        return next((size for size in _SIZES if _fits(driver, function, size, shared_bytes)), 1)
    finally:
        driver.call("cuModuleUnload", module)


def _fits(driver: CudaDriver, function: Any, size: int, shared_bytes: int) -> bool:
    attribute = driver.api.CUlaunchAttribute()
    attribute.id = driver.api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster = attribute.value.clusterDim
    cluster.x, cluster.y, cluster.z = size, 1, 1
    config = launch_config(driver, (size, 1, 1), _THREADS, shared_bytes, [attribute])
    # A size that the GPU does not know at all is refused.
    status, count = driver.function("cuOccupancyMaxActiveClusters")(function, config)
    return not status and count > 0
