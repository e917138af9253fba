"""Kernels by themselves, on a GPU."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import DType
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.launch import Launch, Launcher
from hearth.runtime.device.cuda.programs import Programs
from hearth.runtime.tensors.tensor import Tensor

TYPES: dict[DType, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half a unit in the last place of a number just above 1."""


class Lab:
    """Arrays on the GPU, and launches that run one behind the other."""

    def __init__(self, gpu: CudaDevice) -> None:
        self.gpu = gpu
        self.facts = GpuFacts.of(gpu.context)
        self.programs = Programs(gpu.context, gpu.library.compiler)
        self._launcher = Launcher(gpu.context, dependent=self.facts.dependent)

    def put(self, array: NDArray[Any]) -> Tensor:
        """A copy on the GPU."""
        return self.gpu.constant("put", np.ascontiguousarray(array))

    def poison(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Memory in which every number is none."""
        kind = np.dtype(dtype)
        return self.put(np.full(shape, 99 if kind.kind in "iu" else np.nan, kind))

    def read(self, tensor: Tensor) -> NDArray[Any]:
        """What lies there once all has run."""
        return self.gpu.read(tensor)

    def run(self, launches: Sequence[Launch]) -> None:
        """Queue these launches, each dependent on the one before it."""
        self._launcher.pack(launches).queue(self.gpu.stream)

    def close(self) -> None:
        """Unload the kernels."""
        self.gpu.stream.synchronize()
        self.programs.close()
