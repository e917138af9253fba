"""ONNX Runtime's CUDA provider behind `Engine`: our stream, our memory, our captured graphs."""

from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import onnxruntime as ort

from runtime.config import LLMEngineRunnerConfig
from runtime.device.cuda.cuda_device import CudaDevice
from runtime.device.stream import Stream
from runtime.errors import HearthError
from runtime.executor.engine import (
    Binding,
    CapturedRun,
    EngineConfig,
    EngineOptions,
    Initializers,
    IOTensor,
    SelfContained,
)
from runtime.executor.onnx_cuda_capture import capture_run
from runtime.executor.onnx_cuda_session import DTYPES, ELEMENT_TYPES, open_session, step_error
from runtime.executor.onnx_engine import describe
from runtime.tensors.tensor import Tensor
from runtime.vision_config import VisionConfig

_QUEUED_RUNS = 256
"""Runs after which one waits for the device.

Some operators copy small arrays from pinned memory, which ONNX Runtime frees in the stream's order,
but hands over only at the end of a run that waits. What is left is handed over when the session
goes; where the stream comes to it after the session's allocators have gone, the process aborts.
"""


class OnnxCudaEngine(SelfContained):
    """An ONNX Runtime session on a GPU.

    A graph of the provider's own operators (`fused`) never waits for the device, and a captured
    step of it is a CUDA graph. Some standard operators take sizes from the host, which a CUDA
    graph would freeze: a captured step of those is the kept I/O binding, and has ended when the
    launch returns. A vision tower is not captured, and only queued (`queues`) as well.

    Scratch memory comes from the session's arena, which keeps all that it ever took: what a
    captured graph uses is only handed to later work of the same stream.
    """

    def __init__(
        self, session: ort.InferenceSession, device: CudaDevice, *, fused: bool, queues: bool
    ) -> None:
        self._session = session
        self._device = device
        self._fused = fused
        self._kept: tuple[Sequence[Binding], list[Any]] | None = None
        self._initializers: Initializers | None = None
        self._options, self._waiting = ort.RunOptions(), ort.RunOptions()
        if queues:
            self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._queues = queues
        self._queued = 0
        self.io_tensors: tuple[IOTensor, ...] = describe(session, DTYPES)
        self._batched = {one.name for one in self.io_tensors if one.shape[:1] == ("batch",)}
        # The fused attention takes one row at a time; that of token trees takes all of them.
        self._apart = fused and all(one.name != "tree_mask" for one in self.io_tensors)

    @classmethod
    def open(
        cls,
        folder: Path,
        config: EngineConfig,
        options: EngineOptions,
        device: CudaDevice,
        initializers: Initializers | None = None,
    ) -> "OnnxCudaEngine":
        """Load `model.onnx` onto the device, with its stream for all work.

        `initializers` take the place of what lies beside it.

        Raises `engine_incompatible` without the provider or for a graph that it cannot run
        whole, `engine_corrupt` or `out_of_memory`.
        """
        session = open_session(folder, config, options, device, initializers)
        fused = isinstance(config, LLMEngineRunnerConfig) and config.operators == "contrib"
        queues = fused or isinstance(config, VisionConfig)
        engine = cls(session, device, fused=fused, queues=queues)
        if initializers is not None:
            initializers.release_pages()
            engine._initializers = initializers
        return engine

    def run(self, bindings: Sequence[Binding], stream: Stream, /) -> None:
        """Queue one step; raises `executor_failed`, `out_of_memory` or `device_lost`.

        `stream` must be the device's, which the session was opened with.
        """
        if stream.handle != self._device.stream.handle:
            raise HearthError("internal", "the engine runs on the stream that it was opened with")
        self._queued += 1
        wait = self._queues and self._queued > _QUEUED_RUNS
        self.run_bound(self._bound(bindings), stream, wait=wait)

    def run_bound(self, step: Sequence[Any], stream: Stream, *, wait: bool = False) -> None:
        """Queue what `bind` gave, or run it and `wait`; raises what `run` does."""
        options = self._waiting if wait else self._options
        try:
            for bound in step:
                self._session.run_with_iobinding(bound, options)
        except Exception as error:
            raise step_error(error, stream) from error
        if wait:
            self._queued = 0

    def bind(self, bindings: Sequence[Binding]) -> list[Any]:
        """The I/O bindings of a step, which hold addresses and not memory."""
        return [self._bind(part) for part in self._parts(bindings)]

    def capture(self, bindings: Sequence[Binding], stream: Stream, /) -> CapturedRun:
        """Keep a step for later launches; a CUDA graph's step runs twice on the way.

        The first run lets the arena grow and kernels choose their forms, which a capture forbids.
        """
        if not self._fused:
            return KeptStep(self, bindings)
        self.run(bindings, stream)
        self.run(bindings, stream)
        stream.synchronize()
        step = self._bound(bindings)
        return capture_run(self._device, lambda: self.run_bound(step, stream))

    def close(self) -> None:
        """Free the session and all its memory; captured graphs must be closed before."""
        kept, self._kept = self._kept, None
        if self._queues and self._queued and kept is not None:
            # On a device that is lost nothing is left to be handed over.
            with suppress(HearthError):
                self.run_bound(kept[1], self._device.stream, wait=True)
                self._device.stream.synchronize()
        del self._session

    def _bound(self, bindings: Sequence[Binding]) -> list[Any]:
        if self._kept is None or self._kept[0] is not bindings:
            self._kept = bindings, self.bind(bindings)
        return self._kept[1]

    def _bind(self, bindings: Sequence[Binding]) -> Any:
        bound = self._session.io_binding()
        for one in bindings:
            bind = bound.bind_input if one.direction == "input" else bound.bind_output
            kind = ELEMENT_TYPES[one.tensor.dtype.name]
            bind(one.name, "cuda", 0, kind, one.shape, one.tensor.address)
        return bound

    def _parts(self, bindings: Sequence[Binding]) -> list[Sequence[Binding]]:
        """The step itself, or one step a row where attention takes no more than one at a time."""
        shape = next((one.shape for one in bindings if one.name == "inputs_embeds"), (1, 1))
        rows, steps = shape[:2]
        if not self._apart or rows == 1 or steps == 1:
            return [bindings]
        return [[self._row(one, row) for one in bindings] for row in range(rows)]

    def _row(self, one: Binding, row: int) -> Binding:
        if one.name not in self._batched:
            return one
        whole, shape = one.tensor, (1, *one.shape[1:])
        address = whole.address + row * prod(shape) * whole.dtype.itemsize
        part = Tensor.on_device(whole.name, address, shape, whole.dtype, whole.owner)
        return Binding(one.name, one.direction, part, shape)


class KeptStep:
    """A step whose I/O binding is kept."""

    def __init__(self, engine: OnnxCudaEngine, bindings: Sequence[Binding]) -> None:
        self._engine = engine
        self._step = engine.bind(bindings)

    def launch(self, stream: Stream, /) -> None:
        """Run the step; raises what `OnnxCudaEngine.run` does."""
        self._engine.run_bound(self._step, stream)

    def close(self) -> None:
        """Let go of the binding."""
        self._step = []
