from pathlib import Path

from runtime.config import LLMEngineRunnerConfig
from runtime.device.cuda.cuda_device import CudaDevice
from runtime.device.device import Device
from runtime.errors import HearthError
from runtime.executor.engine import Engine, EngineOptions
from runtime.onnx_runtime import load_onnx_runtime


def open_cuda_engine(
    folder: Path, config: LLMEngineRunnerConfig, options: EngineOptions, device: Device
) -> Engine:
    """The engine of a folder on a GPU, with the library that `config.backend` names.

    Each library is imported only where it serves: neither comes with the other.
    """
    if not isinstance(device, CudaDevice):
        raise HearthError("internal", f"a device of kind {device.kind} runs no CUDA engine")
    if config.backend == "tensorrt":
        from runtime.executor.tensorrt.engine import TensorRTEngine  # noqa: PLC0415

        return TensorRTEngine.open(folder, config, device.context)
    load_onnx_runtime()
    from runtime.executor.onnx_cuda_engine import OnnxCudaEngine  # noqa: PLC0415

    return OnnxCudaEngine.open(folder, config, options, device)
