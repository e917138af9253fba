"""`GraphDriver` on the GPU: the same loop over `OnnxCudaEngine`, eager or by a captured graph."""

from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - names bfloat16 for NumPy
import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import load_config
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.executor.engine import Binding, CapturedRun, EngineOptions, IOTensor
from hearth.runtime.executor.onnx_cuda_engine import OnnxCudaEngine
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.export.graph_driver import GraphDriver

Array = NDArray[Any]
LONGEST_STEP = 64


class CudaGraphDriver(GraphDriver):
    """Host arrays are the truth of eager steps; captured ones leave the caches on the device."""

    def __init__(self, folder: Path, batch: int, capacity: int, device: CudaDevice) -> None:
        self._device = device
        self._batch, self._capacity = batch, capacity
        self._tensors: dict[str, Tensor] = {}
        super().__init__(folder, batch, capacity)

    def _open(self, folder: Path) -> None:
        self.engine = OnnxCudaEngine.open(
            folder, load_config(folder), EngineOptions(), self._device
        )

    def _run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        rows, steps = feeds["attention_pos_id"].shape
        selected = feeds["last_token_ids"].shape[1]
        bindings = self.bindings(rows, steps, selected)
        self._upload(feeds | self.caches)
        self.engine.run(bindings, self._device.stream)
        for name, cache in self.caches.items():
            cache[:] = self._read(name, cache.shape)
        logits = self._read("logits", (rows, selected, self.config.vocab_size))
        return {"logits": logits}

    def bindings(self, rows: int, steps: int, selected: int) -> tuple[Binding, ...]:
        """The step of these sizes, over buffers that stay where they are."""
        sizes = {"batch": rows, "step": steps, "selected": selected}
        return tuple(
            Binding(io.name, io.direction, self._tensor(io), self._shape(io, sizes))
            for io in self.engine.io_tensors
        )

    def capture(self, rows: int) -> CapturedRun:
        """A decode step of so many rows; all caches must have that many."""
        self._upload(self.caches)
        self.filled = self.filled[:rows]
        graph = self.engine.capture(self.bindings(rows, 1, 1), self._device.stream)
        # The step ran on the way, with the inputs of whatever was run before.
        self._device.stream.synchronize()
        self._upload(self.caches)
        return graph

    def replay(self, graph: CapturedRun, tokens: list[int]) -> Array:
        """Feed each row one token; logits [rows, V]."""
        index = self.filled.astype(np.int64)
        self._upload(
            {
                "inputs_embeds": self.table[np.array(tokens)].astype(self.config.dtype),
                "kvcache_start_index": index,
                "attention_pos_id": index,
                "last_token_ids": np.zeros_like(index),
            }
        )
        graph.launch(self._device.stream)
        self.filled = self.filled + 1
        return self._read("logits", (len(tokens), self.config.vocab_size))

    def close(self) -> None:
        """Free the session; buffers belong to the device."""
        self.engine.close()

    def _shape(self, io: IOTensor, sizes: dict[str, int]) -> tuple[int, ...]:
        fixed = {"capacity": self._capacity, "positions": self.rope["rope_cos"].shape[-2]}
        return tuple(
            size if isinstance(size, int) else (sizes | fixed)[str(size)] for size in io.shape
        )

    def _tensor(self, io: IOTensor) -> Tensor:
        name = io.name.removeprefix("present_")
        if name not in self._tensors:
            most = {"batch": self._batch, "step": LONGEST_STEP, "selected": LONGEST_STEP}
            self._tensors[name] = self._device.zeros(name, self._shape(io, most), io.dtype)
            if name in self.rope:
                self._upload({name: self.rope[name]})
        return self._tensors[name]

    def _upload(self, arrays: dict[str, Array]) -> None:
        self._device.stream.synchronize()
        for name, array in arrays.items():
            dense = np.ascontiguousarray(array)
            if name in self._tensors:
                self._device.context.driver.call(
                    "cuMemcpyHtoD", self._tensors[name].address, dense.ctypes.data, dense.nbytes
                )

    def _read(self, name: str, shape: tuple[int, ...]) -> Array:
        tensor = self._tensors[name]
        assert prod(shape) * tensor.dtype.itemsize <= tensor.nbytes
        part = Tensor.on_device(name, tensor.address, shape, tensor.dtype, tensor.owner)
        return self._device.read(part)
