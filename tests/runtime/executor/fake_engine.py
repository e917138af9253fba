from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.device import Stream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import Binding, IOTensor
from hearth.runtime.tensors.registry import Direction, TensorRegistry, TensorSpec
from hearth.runtime.tensors.tensor import Tensor, TensorMap

FLOAT = np.dtype(np.float32)


def host_binding(name: str, direction: Direction, array: NDArray[Any]) -> Binding:
    """A binding of a whole host array."""
    return Binding(name, direction, Tensor(name, array), array.shape)


class FakeEngine:
    """Adds `offset` to x [batch] and notes every call; `failing` names calls that fail."""

    required_context_memory = 64

    def __init__(self) -> None:
        self.io_tensors = (
            IOTensor("x", "input", FLOAT, ("N",)),
            IOTensor("offset", "input", FLOAT, (1,)),
            IOTensor("y", "output", FLOAT, ("N",)),
        )
        self.calls: list[str] = []
        self.failing: set[str] = set()
        self.memory: Tensor | None = None

    def use_profile(self, profile: int, _stream: Stream) -> None:
        self.note(f"profile {profile}")

    def set_context_memory(self, memory: Tensor) -> None:
        self.memory = memory

    def run(self, bindings: Sequence[Binding], _stream: Stream) -> None:
        self.note("run")
        _add(bindings)

    def capture(self, bindings: Sequence[Binding], _stream: Stream) -> "FakeRun":
        self.note("capture")
        return FakeRun(self, bindings)

    def close(self) -> None:
        self.note("close")

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.failing:
            raise HearthError("executor_failed", "as asked")


class FakeRun:
    def __init__(self, engine: FakeEngine, bindings: Sequence[Binding]) -> None:
        self._engine = engine
        self._bindings = bindings

    def launch(self, _stream: Stream) -> None:
        self._engine.note("launch")
        _add(self._bindings)

    def close(self) -> None:
        self._engine.note("free")


def _add(bindings: Sequence[Binding]) -> None:
    arrays = {one.name: one.tensor.view(one.shape) for one in bindings}
    arrays["y"][:] = arrays["x"] + arrays["offset"]


def fake_registry() -> TensorRegistry:
    """The registry of `FakeEngine`; `offset` is no part of it."""
    registry = TensorRegistry()
    registry.add(TensorSpec("x", "input", FLOAT, ("batch",)))
    registry.add(TensorSpec("y", "output", FLOAT, ("batch",)))
    return registry


def fake_tensors() -> TensorMap:
    """Buffers for batches of up to four."""
    tensors = TensorMap()
    tensors.set("x", Tensor("x", np.arange(4, dtype=np.float32)))
    tensors.set("offset", Tensor("offset", np.full(1, 10, np.float32)))
    tensors.set("y", Tensor.zeros("y", (4,), FLOAT))
    return tensors
