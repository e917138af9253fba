"""The part of TensorRT's Python API that the engine uses, in the form of 8.6 and of 10 and later.

An engine adds `offset` to x; memory is that of the host, so that addresses can be read.
"""

import ctypes
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np

from hearth.runtime.device.device import Stream
from hearth.runtime.executor.engine import Binding
from hearth.runtime.tensors.tensor import Tensor

FLOAT = np.dtype(np.float32)
OFFSET = 10.0


class TensorIOMode(Enum):
    INPUT = 1
    OUTPUT = 2


class DataType(Enum):
    FLOAT = 0
    HALF = 1
    FP8 = 6


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING = 0, 1, 2


class Context:
    """An execution context; `calls` is shared by all contexts of an engine."""

    def __init__(self, engine: "FakeEngine", number: int) -> None:
        self._engine, self._number = engine, number
        self.profile: int | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory: tuple[int, ...] = ()

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._engine.calls.append(f"{self._number}: profile {profile} on {stream}")
        self.profile = profile
        return "profile" not in self._engine.failing

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._engine.calls.append(f"{self._number}: shape {name}")
        self.shapes[name] = shape
        return "shape" not in self._engine.failing

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._engine.calls.append(f"{self._number}: address {name}")
        self.addresses[name] = address
        return "address" not in self._engine.failing

    def execute_async_v3(self, stream: int) -> bool:
        self._engine.calls.append(f"{self._number}: execute on {stream}")
        if "execute" in self._engine.failing:
            self._engine.log.log(ILogger.ERROR, self._engine.reason)
            return False
        (rows,) = self.shapes["x"]
        x, y = (
            np.ctypeslib.as_array(
                ctypes.cast(self.addresses[name], ctypes.POINTER(ctypes.c_float)), (rows,)
            )
            for name in ("x", "y")
        )
        y[:] = x + OFFSET
        return True


class OldContext(Context):
    """TensorRT 8: scratch memory is an attribute."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("memory" if name == "device_memory" else name,
                            (value,) if name == "device_memory" else value)  # fmt: skip


class NewContext(Context):
    """TensorRT 10: scratch memory has a size."""

    def set_device_memory(self, address: int, nbytes: int) -> None:
        self.memory = (address, nbytes)


class FakeEngine:
    """Profile 0 takes 1 to 4 rows, profile 1 takes 2; `failing` names calls that fail."""

    num_io_tensors = 3
    num_optimization_profiles = 2
    num_layers = 1
    ranges = (((1,), (2,), (4,)), ((2,), (2,), (2,)))

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: set[str] = set()
        self.reason = "it broke"
        self.contexts: list[Context] = []
        self.log: Any = None
        self.dtype = DataType.FLOAT

    def get_tensor_name(self, index: int) -> str:
        return ("y", "x", "table")[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.OUTPUT if name == "y" else TensorIOMode.INPUT

    def get_tensor_dtype(self, _name: str) -> DataType:
        return self.dtype

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (7,) if name == "table" else (-1,)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        assert name == "x"
        return list(self.ranges[profile])

    def _add(self, context: Context) -> Any:
        if "context" in self.failing:
            return None
        self.contexts.append(context)
        return context


class OldEngine(FakeEngine):
    """TensorRT 8.6."""

    device_memory_size = 640

    def create_execution_context_without_device_memory(self) -> Any:
        return self._add(OldContext(self, len(self.contexts)))


class NewEngine(FakeEngine):
    """TensorRT 10 and later."""

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return (640, 64)[profile]

    def create_execution_context(self, strategy: str) -> Any:
        assert strategy == "user managed"
        return self._add(NewContext(self, len(self.contexts)))


class RuntimeConfig:
    """How TensorRT-RTX makes a context; caches are its own objects."""

    def __init__(self) -> None:
        self.strategy: Any = None
        self.cache: Any = None
        self.dynamic_shapes_kernel_specialization_strategy: Any = None

    def create_runtime_cache(self) -> Any:
        return RuntimeCacheObject()

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def set_runtime_cache(self, cache: Any) -> bool:
        self.cache = cache
        return True


class RuntimeCacheObject:
    """It takes what begins with "ours", as the library takes what is of this GPU and version."""

    def __init__(self) -> None:
        self.data: bytes | None = b""

    def deserialize(self, data: bytes) -> bool:
        if data.startswith(b"ours"):
            self.data = data
        return self.data == data

    def serialize(self) -> bytes | None:
        return self.data


class RtxEngine(FakeEngine):
    """TensorRT-RTX 1.x, which has no call of the old memory API; a step compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.configs: list[RuntimeConfig] = []

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return (640, 64)[profile]

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, config: RuntimeConfig) -> Any:
        self.configs.append(config)
        return self._add(NewContext(self, len(self.contexts)))


def fake_library(engine: FakeEngine, version: str) -> Any:
    """A module whose runtime reads `engine` out of any plan."""

    class Runtime:
        engine_host_code_allowed = False

        def __init__(self, log: Any) -> None:
            self._log = log

        def deserialize_cuda_engine(self, plan: Any) -> FakeEngine | None:
            engine.log = self._log
            engine.calls.append(f"deserialize {len(plan)}, host code {self._host_code()}")
            if "deserialize" in engine.failing:
                self._log.log(ILogger.ERROR, engine.reason)
                return None
            return engine

        def _host_code(self) -> bool:
            return self.engine_host_code_allowed

    library = SimpleNamespace(
        __version__=version, ILogger=ILogger, Runtime=Runtime, TensorIOMode=TensorIOMode
    )
    if not isinstance(engine, OldEngine):
        strategies = SimpleNamespace(USER_MANAGED="user managed")
        library.ExecutionContextAllocationStrategy = strategies
    if isinstance(engine, RtxEngine):
        kinds = SimpleNamespace(EAGER="eager", LAZY="lazy")
        library.DynamicShapesKernelSpecializationStrategy = kinds
    return library


class NumberedStream:
    """A stream with a handle and nothing to wait for."""

    handle = 77

    def synchronize(self) -> None:
        pass


STREAM: Stream = NumberedStream()


def step(rows: int) -> tuple[Binding, ...]:
    """The bindings of a step of x = 0, 1, 2 ..."""
    x = Tensor("x", np.arange(rows, dtype=np.float32))
    y, table = Tensor.zeros("y", (rows,), FLOAT), Tensor.zeros("table", (7,), FLOAT)
    return (
        Binding("x", "input", x, (rows,)),
        Binding("table", "input", table, (7,)),
        Binding("y", "output", y, (rows,)),
    )
