"""The part of TensorRT 8.6's builder API that the builder module uses; it notes what it is told."""

from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any


class LayerType(Enum):
    CAST, ELEMENTWISE, MATRIX_MULTIPLY = 1, 2, 3


class Layer:
    """A layer from tensor names to tensor names."""

    def __init__(self, kind: str, inputs: str, outputs: str, to_type: str | None = None) -> None:
        self.type = LayerType[kind]
        self._inputs, self._outputs = inputs.split(), outputs.split()
        self.num_inputs, self.num_outputs = len(self._inputs), len(self._outputs)
        self.to_type = to_type
        self.precision: str | None = None
        self.output_types: list[str] = []

    def get_input(self, index: int) -> Any:
        return SimpleNamespace(name=self._inputs[index])

    def get_output(self, index: int) -> Any:
        return SimpleNamespace(name=self._outputs[index])

    def set_output_type(self, _index: int, dtype: str) -> None:
        self.output_types.append(dtype)


class CastLayer(Layer):
    """The class that a layer is given to ask for `to_type`."""


class Flags(IntEnum):
    EXPLICIT_BATCH = 0


class FakeBuilder:
    """A module like `tensorrt` 8.6; `error` is what it logs when a plan cannot be made or opened.

    `engine` is what a plan is opened as.
    """

    __version__ = "8.6.1"
    NetworkDefinitionCreationFlag = Flags
    BuilderFlag = SimpleNamespace(
        FP16="FP16",
        OBEY_PRECISION_CONSTRAINTS="OBEY",
        TF32="TF32",
        VERSION_COMPATIBLE="COMPATIBLE",
    )
    MemoryPoolType = SimpleNamespace(WORKSPACE="WORKSPACE")
    LayerType = LayerType
    ICastLayer = CastLayer
    float32 = "float32"

    class ILogger:
        INTERNAL_ERROR, ERROR, WARNING = 0, 1, 2

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.error: str | None = None
        self.starts = True
        self.cache_fits = True
        self.layers: list[Layer] = []
        self.engine: Any = SimpleNamespace(device_memory_size=640)

    def Runtime(self, logger: Any) -> Any:  # noqa: N802 - the library's name
        self._logger = logger
        return SimpleNamespace(
            engine_host_code_allowed=False, deserialize_cuda_engine=self._deserialize
        )

    def _deserialize(self, plan: Any) -> Any:
        self.notes.append(("opened", bytes(plan)))
        if self.error is None:
            return self.engine
        self._logger.log(self.ILogger.ERROR, self.error)
        return None

    def Builder(self, logger: Any) -> Any:  # noqa: N802 - likewise
        if not self.starts:
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._logger = logger
        return self

    def create_network(self, flags: int) -> Any:
        self.notes.append(("network", flags))
        return SimpleNamespace(num_layers=len(self.layers), get_layer=self.layers.__getitem__)

    def OnnxParser(self, _network: Any, _logger: Any) -> Any:  # noqa: N802 - likewise
        return SimpleNamespace(parse_from_file=lambda path: not path.endswith("bad"), num_errors=0)

    def create_builder_config(self) -> Any:
        return self

    def set_flag(self, flag: str) -> None:
        self.notes.append(flag)

    def clear_flag(self, flag: str) -> None:
        self.notes.append(f"no {flag}")

    def set_memory_pool_limit(self, pool: str, limit: int) -> None:
        self.notes.append((pool, limit))

    def create_optimization_profile(self) -> Any:
        return SimpleNamespace(set_shape=lambda *shape: self.notes.append(shape))

    def add_optimization_profile(self, _profile: Any) -> int:
        return 0

    def create_timing_cache(self, data: bytes) -> Any:
        return SimpleNamespace(data=data, serialize=lambda: b"timed")

    def set_timing_cache(self, cache: Any, *, ignore_mismatch: bool) -> bool:
        self.notes.append(("cache", cache.data, ignore_mismatch))
        return self.cache_fits or not cache.data

    def build_serialized_network(self, _network: Any, _config: Any) -> bytes | None:
        if self.error is None:
            return b"plan"
        self._logger.log(self.ILogger.WARNING, "hm")
        self._logger.log(self.ILogger.ERROR, self.error)
        return None
