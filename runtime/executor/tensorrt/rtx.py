from pathlib import Path
from typing import Any

from runtime.device.cuda.compiler import read_entry, write_entry


class RuntimeCache:
    """What TensorRT-RTX compiles for a plan on this GPU, kept in a file from start to start.

    A plan of TensorRT-RTX has no kernels yet. The library itself compares version, GPU and driver
    with those of the file, and takes nothing of others.
    """

    def __init__(self, library: Any, engine: Any, path: Path) -> None:
        self._library = library
        self._engine = engine
        self._path = path
        self._cache = engine.create_runtime_config().create_runtime_cache()
        self._kept = read_entry(path)
        if self._kept is not None:
            self._cache.deserialize(self._kept)

    def new_context(self, *, captured: bool) -> Any:
        """An execution context without scratch memory of its own.

        Where steps are `captured`, kernels for their shape are compiled before the first one ends:
        a capture keeps those that it saw. Elsewhere a step does not wait for them.
        """
        kinds = self._library.DynamicShapesKernelSpecializationStrategy
        strategies = self._library.ExecutionContextAllocationStrategy
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategies.USER_MANAGED)
        config.dynamic_shapes_kernel_specialization_strategy = (
            kinds.EAGER if captured else kinds.LAZY
        )
        config.set_runtime_cache(self._cache)
        return self._engine.create_execution_context(config)

    def keep(self) -> None:
        """Write the file, where something was compiled since."""
        made = self._cache.serialize()
        data = None if made is None else bytes(memoryview(made))
        if data is not None and data != self._kept:
            self._kept = data
            write_entry(self._path, data)
