"""ONNX Runtime's CUDA provider behind `Engine`: our stream, our memory."""

from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort

from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.device import Stream
from hearth.runtime.engine_folder import MODEL_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.executor import onnx_engine
from hearth.runtime.executor.engine import (
    Binding,
    CapturedRun,
    EngineConfig,
    EngineOptions,
    Initializers,
    IOTensor,
    SelfContained,
)
from hearth.runtime.executor.onnx_engine import describe
from hearth.runtime.onnx_runtime import CUDA_PROVIDER, check_provider, check_version
from hearth.runtime.vision_config import VisionConfig

ELEMENT_TYPES = {
    "float32": 1,
    "uint8": 2,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "bfloat16": 16,
}
"""ONNX's numbers for the types of our buffers, by their NumPy names."""

DTYPES = {**onnx_engine.DTYPES, "tensor(bfloat16)": np.dtype(ml_dtypes.bfloat16)}
ON_THE_HOST = frozenset({"Shape", "Squeeze", "Unsqueeze", "Cast", "Sub", "Concat"})
"""Operators that compute shapes."""


def open_session(
    folder: Path,
    config: EngineConfig,
    options: EngineOptions,
    device: CudaDevice,
    initializers: Initializers | None = None,
) -> ort.InferenceSession:
    """A session whose work goes to the device's stream; raises as `OnnxCudaEngine.open`."""
    check_version(config.dialect, "cuda", ort.__version__)
    check_provider(ort)
    # The wheel brings no CUDA libraries; those of other packages must be in the process first.
    with redirect_stdout(StringIO()):  # what it cannot find, the provider says better
        ort.preload_dlls()
    path = folder / MODEL_FILE
    provider = (CUDA_PROVIDER, provider_options(device.stream.handle))
    made = session_options(options)
    onnx_engine.add_initializers(made, initializers)
    try:
        session = ort.InferenceSession(path, made, providers=[provider])
    except Exception as error:
        raise onnx_engine.load_error(error, path, "onto the GPU") from error
    _check_placement(session)
    return session


def provider_options(stream: int) -> dict[str, str]:
    """Settings of the CUDA provider; `stream` is the handle of ours."""
    return {
        "device_id": "0",
        "user_compute_stream": str(stream),
        # Powers of two would take up to twice the memory of a large prefill.
        "arena_extend_strategy": "kSameAsRequested",
        # Full float32 where the model is float32.
        "use_tf32": "0",
    }


def session_options(options: EngineOptions) -> ort.SessionOptions:
    """Settings of a session: the host only queues work, so one thread is enough."""
    made = onnx_engine.sequential_options(options.threads or 1)
    made.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    # Products of few rows have kernels of their own, and the first run selects the fastest.
    made.add_session_config_entry("ep.cuda.enable_gemm_auto_tune", "1")
    return made


def step_error(error: Exception, stream: Stream) -> HearthError:
    """Make the error of a failed step: `device_lost` if the context has died with it."""
    try:
        stream.synchronize()
    except HearthError as lost:
        # Another error of the stream says less than the step's own.
        if lost.code == "device_lost":
            return lost
    return onnx_engine.step_error(error, "the GPU has")


def _check_placement(session: ort.InferenceSession) -> None:
    """Refuse a graph of which a part would run on the CPU, slowly and unreported."""
    if CUDA_PROVIDER not in session.get_providers():
        raise HearthError(
            "engine_incompatible",
            "the CUDA provider of ONNX Runtime cannot be loaded, its CUDA or cuDNN is missing: "
            "pip install 'onnxruntime-gpu[cuda,cudnn]'",
            "device",
        )
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes() if part.ep_name != CUDA_PROVIDER else ():
            if node.op_type not in ON_THE_HOST:
                raise HearthError(
                    "engine_incompatible",
                    f"the CUDA provider cannot run {node.op_type} ({node.name})",
                    "operators",
                )


_QUEUED_RUNS = 256
"""Number of runs after which a run waits for the device.

Some operators copy small arrays from pinned memory, which ONNX Runtime frees in the stream's order,
but hands over only at the end of a run that waits. What is left is handed over when the session
goes; where the stream comes to it after the session's allocators have gone, the process aborts.
"""


class OnnxCudaEngine(SelfContained):
    """An ONNX Runtime session on a GPU.

    Some operators take sizes from the host, which a CUDA graph would freeze: a captured step is the
    kept I/O binding, and has ended when the launch returns. Steps of a vision tower are not
    captured, and only queued (`queues`).
    """

    def __init__(self, session: ort.InferenceSession, device: CudaDevice, *, queues: bool) -> None:
        self._session = session
        self._device = device
        self._kept: tuple[Sequence[Binding], Any] | None = None
        self._initializers: Initializers | None = None
        self._options, self._waiting = ort.RunOptions(), ort.RunOptions()
        if queues:
            self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._queues = queues
        self._queued = 0
        self.io_tensors: tuple[IOTensor, ...] = describe(session, DTYPES)

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

        `initializers` replace the files beside it.

        Raises `engine_incompatible` without the provider or for a graph that it cannot run
        whole, `engine_corrupt` or `out_of_memory`.
        """
        session = open_session(folder, config, options, device, initializers)
        engine = cls(session, device, queues=isinstance(config, VisionConfig))
        if initializers is not None:
            initializers.release_pages()
            engine._initializers = initializers
        return engine

    def run(self, bindings: Sequence[Binding], stream: Stream, /) -> None:
        """Queue one step; raises `executor_failed`, `out_of_memory` or `device_lost`.

        `stream` must be the stream of the device with which the session was opened.
        """
        if stream.handle != self._device.stream.handle:
            raise HearthError("internal", "the engine runs on the stream that it was opened with")
        self._queued += 1
        wait = self._queues and self._queued > _QUEUED_RUNS
        if self._kept is None or self._kept[0] is not bindings:
            self._kept = bindings, self.bind(bindings)
        self.run_bound(self._kept[1], stream, wait=wait)

    def run_bound(self, step: Any, stream: Stream, *, wait: bool = False) -> None:
        """Queue bindings from `bind`, or run them and `wait`; raises the errors of `run`."""
        try:
            self._session.run_with_iobinding(step, self._waiting if wait else self._options)
        except Exception as error:
            raise step_error(error, stream) from error
        if wait:
            self._queued = 0

    def bind(self, bindings: Sequence[Binding]) -> Any:
        """The I/O binding of a step, which holds addresses and not memory."""
        bound = self._session.io_binding()
        for one in bindings:
            bind = bound.bind_input if one.direction == "input" else bound.bind_output
            kind = ELEMENT_TYPES[one.tensor.dtype.name]
            bind(one.name, "cuda", 0, kind, one.shape, one.tensor.address)
        return bound

    def capture(self, bindings: Sequence[Binding], _stream: Stream, /) -> CapturedRun:
        """Keep a step for later launches."""
        return KeptStep(self, bindings)

    def close(self) -> None:
        """Free the session and all its memory."""
        kept, self._kept = self._kept, None
        if self._queues and self._queued and kept is not None:
            # On a device that is lost nothing is left to be handed over.
            with suppress(HearthError):
                self.run_bound(kept[1], self._device.stream, wait=True)
                self._device.stream.synchronize()
        del self._session


class KeptStep:
    """A step whose I/O binding is kept."""

    def __init__(self, engine: OnnxCudaEngine, bindings: Sequence[Binding]) -> None:
        self._engine = engine
        self._step = engine.bind(bindings)

    def launch(self, stream: Stream, /) -> None:
        """Run the step; raises the errors of `OnnxCudaEngine.run`."""
        self._engine.run_bound(self._step, stream)

    def close(self) -> None:
        """Let go of the binding."""
        self._step = None
