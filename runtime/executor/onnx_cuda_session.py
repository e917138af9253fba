"""Opening an ONNX Runtime session on a GPU, and what its errors mean."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime as ort

from runtime.device.cuda.cuda_device import CudaDevice
from runtime.device.stream import Stream
from runtime.engine_folder import MODEL_FILE
from runtime.errors import HearthError
from runtime.executor import onnx_engine
from runtime.executor.engine import EngineConfig, EngineOptions, Initializers
from runtime.onnx_runtime import CUDA_PROVIDER, check_provider, check_version

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
"""What computes with shapes."""


def open_session(
    folder: Path,
    config: EngineConfig,
    options: EngineOptions,
    device: CudaDevice,
    initializers: Initializers | None = None,
) -> ort.InferenceSession:
    """A session whose work goes to the device's stream; raises what `OnnxCudaEngine.open` does."""
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
    made = ort.SessionOptions()
    made.intra_op_num_threads = options.threads or 1
    made.inter_op_num_threads = 1
    made.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # A pattern would be kept for every shape; prefill has hundreds of them.
    made.enable_mem_pattern = False
    made.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    # Products of few rows have kernels of their own, and the first run picks the fastest.
    made.add_session_config_entry("ep.cuda.enable_gemm_auto_tune", "1")
    return made


def step_error(error: Exception, stream: Stream) -> HearthError:
    """What a failed step means: `device_lost` when the context has died with it."""
    try:
        stream.synchronize()
    except HearthError as lost:
        # Another error of the stream says less than the step's own.
        if lost.code == "device_lost":
            return lost
    return onnx_engine.step_error(error, "the GPU has")


def _check_placement(session: ort.InferenceSession) -> None:
    """Refuse a graph of which a part would run on the CPU, and slowly, without a word."""
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
