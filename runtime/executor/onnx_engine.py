from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from hearth.runtime.device.device import Stream
from hearth.runtime.engine_folder import MODEL_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import (
    Binding,
    EngineConfig,
    EngineOptions,
    Initializers,
    IOTensor,
    SelfContained,
    physical_cores,
)
from hearth.runtime.memory.system import release_free_memory
from hearth.runtime.onnx_runtime import check_version
from hearth.runtime.packages import version_numbers

BOUNDED_SPIN_SINCE = (1, 31)
"""ONNX Runtime that is known to bound the time a thread spins."""
SHORT_SPIN_US = "10"

_LIBRARY_ERRORS: tuple[type[Exception], ...] = (
    # An I/O binding reports through RuntimeError what a plain run reports by its own types.
    RuntimeError,
    *(
        getattr(ort_state, name)
        for name in (
            "EPFail",
            "Fail",
            "InvalidArgument",
            "InvalidGraph",
            "InvalidProtobuf",
            "NoModel",
            "NoSuchFile",
            "NotImplemented",
            "RuntimeException",
        )
    ),
)
_RUN_ERRORS: tuple[type[Exception], ...] = (*_LIBRARY_ERRORS, MemoryError)
_BFLOAT16 = 16
"""ONNX's number for it."""
_OUT_OF_MEMORY = ("out of memory", "Failed to allocate memory", "bad allocation", "bad_alloc")
_OUTSIDE = "escapes model directory"
DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(bool)": np.dtype(np.bool_),
    "tensor(uint8)": np.dtype(np.uint8),
}


class OnnxEngine(SelfContained):
    """An ONNX Runtime session on the CPU, and the mapped files that it reads."""

    def __init__(
        self, session: ort.InferenceSession, initializers: Initializers | None = None
    ) -> None:
        self._session = session
        self._initializers = initializers
        self.io_tensors = describe(session, DTYPES)

    @classmethod
    def open(
        cls,
        folder: Path,
        config: EngineConfig,
        options: EngineOptions,
        initializers: Initializers | None = None,
    ) -> "OnnxEngine":
        """Load `model.onnx`; raises `engine_incompatible`, `engine_corrupt` or `out_of_memory`.

        `initializers` replace the files beside it.
        """
        check_version(config.dialect, "cpu", ort.__version__)
        path, made = folder / MODEL_FILE, session_options(options)
        add_initializers(made, initializers)
        try:
            session = ort.InferenceSession(path, made, providers=["CPUExecutionProvider"])
        except _RUN_ERRORS as error:
            raise load_error(error, path, "into memory") from error
        release_free_memory()
        if initializers is not None:
            initializers.release_pages()
        return cls(session, initializers)

    def run(self, bindings: Sequence[Binding], stream: Stream) -> None:
        """Bind everything and run once; raises `executor_failed` or `out_of_memory`."""
        self.capture(bindings, stream).launch(stream)

    def capture(self, bindings: Sequence[Binding], _stream: Stream) -> "OnnxRun":
        """Keep an I/O binding over the arrays of `bindings`.

        Arrays of one address become one value, so that an output bound to its input's memory is
        written in place.
        """
        binding = self._session.io_binding()
        values: dict[tuple[object, ...], Any] = {}
        for one in bindings:
            key = (one.tensor.address, one.shape, one.tensor.dtype)
            if key not in values:
                values[key] = ort.OrtValue.ortvalue_from_numpy(one.tensor.view(one.shape))
            if one.direction == "input":
                binding.bind_ortvalue_input(one.name, values[key])
            else:
                binding.bind_ortvalue_output(one.name, values[key])
        return OnnxRun(self._session, binding, list(values.values()))

    def close(self) -> None:
        """Free the session."""
        del self._session


class OnnxRun:
    """A kept I/O binding; `values` alias the arrays of the step and keep them alive."""

    def __init__(self, session: ort.InferenceSession, binding: Any, values: list[Any]) -> None:
        self._session = session
        self._binding = binding
        self.values = values

    def launch(self, _stream: Stream) -> None:
        """Run on the calling thread and the session's own; raises as `OnnxEngine.run`."""
        try:
            self._session.run_with_iobinding(self._binding)
        except _RUN_ERRORS as error:
            raise step_error(error, "the machine has") from error

    def close(self) -> None:
        """Let go of the arrays and the session."""
        self.values = []
        del self._binding, self._session


def add_initializers(made: ort.SessionOptions, given: Initializers | None) -> None:
    """Let a session read these instead of the files beside its graph; they must outlive it."""
    if given is None:
        return
    if given.files:
        add = getattr(made, "add_external_initializers_from_files_in_memory", None)
        if add is None:
            raise HearthError(
                "engine_incompatible",
                f"ONNX Runtime {ort.__version__} serves the engine folder's own weights alone: "
                "take a newer one, of Python 3.11 or newer",
                "weights",
            )
        files = given.files
        add(list(files), list(files.values()), [len(one) for one in files.values()])
    for name, array in given.arrays.items():
        given.held.append(value := _shared(array))
        made.add_initializer(name, value)


def _shared(array: NDArray[Any]) -> ort.OrtValue:
    """The array as a value that shares its memory, also for types that NumPy does not have."""
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def step_error(error: Exception, who: str) -> HearthError:
    """Make the error of a failed step."""
    if _is_out_of_memory(error):
        return HearthError("out_of_memory", f"{who} no memory for the scratch of a step")
    return HearthError("executor_failed", "the engine failed in a step")


def load_error(error: Exception, path: Path, where: str) -> HearthError:
    """Make the error of a graph that cannot be loaded on `where`."""
    if _is_out_of_memory(error):
        return HearthError("out_of_memory", f"{path} does not fit {where}", MODEL_FILE)
    if _OUTSIDE in str(error):
        what = "its data lie outside the folder, by a symbolic link or by .. in their name"
        text = f"{path} is not loaded: {what}; put the files themselves there, or export it again"
        return HearthError("engine_corrupt", text, MODEL_FILE)
    return HearthError(
        "engine_corrupt", f"{path} or its data cannot be loaded: export the model again", MODEL_FILE
    )


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or any(part in text for part in _OUT_OF_MEMORY)


def sequential_options(threads: int) -> ort.SessionOptions:
    """Settings of any session: one thread pool, and scratch memory that does not pile up."""
    made = ort.SessionOptions()
    made.intra_op_num_threads = threads
    made.inter_op_num_threads = 1
    made.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # A pattern would be kept for every shape; prefill has hundreds of them.
    made.enable_mem_pattern = False
    return made


def session_options(options: EngineOptions) -> ort.SessionOptions:
    """Settings of a session on the CPU, whose threads are all physical cores unless named."""
    made = sequential_options(options.threads or physical_cores())
    # A thread that spins for long is the fastest alone and several times slower beside a
    # neighbour; a few microseconds save most wake-ups at no cost (docs/lab/what-was-learnt.md).
    bounded = version_numbers(ort.__version__) >= BOUNDED_SPIN_SINCE
    allowed = "1" if options.spin or bounded else "0"
    made.add_session_config_entry("session.intra_op.allow_spinning", allowed)
    if bounded and not options.spin:
        made.add_session_config_entry("session.intra_op.spin_duration_us", SHORT_SPIN_US)
    # Threads spin within a step only; an idle service leaves the processor alone.
    made.add_session_config_entry("session.force_spinning_stop", "1")
    # Quantised weights times 8-bit activations; the exact levels are up to 40 times slower.
    made.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    return made


def describe(
    session: ort.InferenceSession, served: dict[str, np.dtype[Any]]
) -> tuple[IOTensor, ...]:
    """All bindings, inputs first; raises `engine_incompatible` for a type that is not `served`."""
    listed: list[IOTensor] = []
    for direction, values in (("input", session.get_inputs()), ("output", session.get_outputs())):
        for value in values:
            dtype = served.get(value.type)
            if dtype is None:
                raise HearthError(
                    "engine_incompatible",
                    f"the engine's binding {value.name} has a type that is not served",
                    value.name,
                )
            shape = tuple(value.shape)
            listed.append(IOTensor(value.name, direction, dtype, shape))  # type: ignore[arg-type] # one of both
    return tuple(listed)
