from collections.abc import Sequence

import numpy as np

from runtime.device.device import Device
from runtime.executor.engine_executor import EngineExecutor


def share_context_memory(executors: Sequence[EngineExecutor], device: Device) -> None:
    """Give engines one scratch memory, as large as the one that wants most; before any capture.

    Their steps go to one stream, so that no two use it at a time. Raises `out_of_memory`.
    """
    needed = max(executor.required_context_memory() for executor in executors)
    if not needed:
        return
    memory = device.zeros("context_memory", (needed,), np.dtype(np.uint8))
    for executor in executors:
        executor.set_context_memory(memory)
