from typing import Any

from runtime.device.cuda.context import CudaContext
from runtime.device.cuda.driver import CudaDriver

_FIRST = (9, 0)
LARGEST = 8
"""The most blocks of a cluster that our kernels have."""
_SIZES = (LARGEST, 4, 2)
_THREADS = 256
_KERNEL = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry empty() { ret; }\n\0"


def largest_cluster(context: CudaContext, shared_bytes: int) -> int:
    """How many blocks, 8 at the most, of `shared_bytes` each the GPU can run as one cluster.

    1 where it runs no clusters: before compute capability 9.0, and where what there is of the GPU
    (a part of it, or a share) has no multiprocessors for one side by side.
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
    config = driver.api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = size, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = _THREADS, 1, 1
    config.sharedMemBytes = shared_bytes
    attribute = driver.api.CUlaunchAttribute()
    attribute.id = driver.api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster = attribute.value.clusterDim
    cluster.x, cluster.y, cluster.z = size, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    # A size that the GPU does not know at all is refused.
    status, count = driver.function("cuOccupancyMaxActiveClusters")(function, config)
    return not status and count > 0
