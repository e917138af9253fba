"""Runs a TensorRT plan by the real engine and device memory, to compare it with other engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from hearth.runtime.config import load_config
from hearth.runtime.device.cuda.context import open_context
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.stream import CudaStream
from hearth.runtime.engine_folder import EMBEDDING_FILE, ROPE_FILE
from hearth.runtime.executor.engine import Binding
from hearth.runtime.executor.tensorrt_engine import TensorRTEngine
from hearth.runtime.tensors.profiles import InferenceDims, generation_profile
from hearth.runtime.tensors.registry import build_registry_for_llm
from hearth.runtime.tensors.tensor import Tensor

Array = NDArray[Any]


class PlanDriver:
    """Steps over a plan of the classic dialect; what a step returns lies on the host.

    A batch of a decode step must be one of the plan's. `filled` holds the slots in use.
    """

    def __init__(self, folder: Path) -> None:
        self.config = load_config(folder)
        self.context = open_context()
        self.stream = CudaStream(self.context)
        self.engine = TensorRTEngine.open(folder, self.config, self.context)
        self._memory = CudaMemory(self.context)
        scratch = max(self.engine.required_context_memory, 1)
        self.engine.set_context_memory(
            self._memory.zeros("scratch", (scratch,), np.dtype(np.uint8))
        )
        registry = build_registry_for_llm(self.config)
        self._specs = {spec.name: spec for spec in registry.specs}
        largest = InferenceDims.prefill(
            self.config.max_supported_batch_size,
            self.config.prefill_chunk,
            self.config.max_kv_cache_capacity,
        )
        self.tensors = {
            spec.name: self._memory.zeros(spec.name, spec.resolve(largest), spec.dtype)
            for spec in registry.specs
        }
        for name, table in load_file(folder / ROPE_FILE).items():
            if self.config.use_context_dependent_rope:
                self.put(f"rope_{name}", np.stack([table] * largest.batch))
                continue
            self.tensors[f"rope_{name}"] = self._memory.zeros(
                f"rope_{name}", table.shape, table.dtype
            )
            self.put(f"rope_{name}", table)
        self.table = load_file(folder / EMBEDDING_FILE)["embedding"]
        self.filled = np.zeros(self.config.max_supported_batch_size, np.int64)

    def put(self, name: str, array: Array) -> None:
        """Copy a dense array to the beginning of a buffer."""
        tensor = self.tensors[name]
        data = np.ascontiguousarray(array, tensor.dtype)
        self.context.driver.call("cuMemcpyHtoD", tensor.address, data.ctypes.data, data.nbytes)

    def get(self, name: str, shape: tuple[int, ...]) -> Array:
        """A dense array from the beginning of a buffer."""
        tensor: Tensor = self.tensors[name]
        array = np.empty(shape, tensor.dtype)
        self.context.driver.call("cuMemcpyDtoH", array.ctypes.data, tensor.address, array.nbytes)
        return array

    def dims(self, batch: int, tokens: int) -> InferenceDims:
        """The dims of a step."""
        return InferenceDims.prefill(batch, tokens, self.config.max_kv_cache_capacity)

    def bindings(self, dims: InferenceDims) -> tuple[Binding, ...]:
        """All bindings of a step."""
        found = []
        for one in self.engine.io_tensors:
            spec = self._specs.get(one.name)
            tensor = self.tensors[one.name]
            shape = tensor.shape if spec is None else spec.resolve(dims)
            found.append(Binding(one.name, one.direction, tensor, shape))
        return tuple(found)

    def feed(self, rows: Sequence[Sequence[int]]) -> InferenceDims:
        """Fill the inputs of a step and choose its profile."""
        batch, tokens = len(rows), max(map(len, rows))
        ids, positions = np.zeros((batch, tokens), np.int64), np.zeros((batch, tokens), np.int64)
        for row, one in enumerate(rows):
            ids[row, : len(one)] = one
            positions[row, : len(one)] = self.filled[row] + np.arange(len(one))
        self.put("inputs_embeds", self.table[ids].astype(self._specs["inputs_embeds"].dtype))
        self.put("kvcache_start_index", self.filled[:batch])
        self.put("attention_pos_id", positions)
        self.put("last_token_ids", np.array([[len(one) - 1] for one in rows]))
        decode = tokens == 1 and batch in self.config.static_decode_batches
        self.engine.use_profile(
            generation_profile(self.config, batch) if decode else 0, self.stream
        )
        return self.dims(batch, tokens)

    def step(self, rows: Sequence[Sequence[int]]) -> Array:
        """Feed each row its next tokens; logits [B, V] of the last of each."""
        dims = self.feed(rows)
        self.engine.run(self.bindings(dims), self.stream)
        return self.finish(rows, dims)

    def finish(self, rows: Sequence[Sequence[int]], dims: InferenceDims) -> Array:
        """Wait, put the new rows into the caches, and return the logits [B, V]."""
        self.stream.synchronize()
        for name in [one for one in self._specs if one.startswith("present_")]:
            fresh = self.get(name, self._specs[name].resolve(dims))
            cache_name = name.removeprefix("present_")
            shape = self._specs[cache_name].resolve(dims)
            cache = self.get(cache_name, shape)
            for row, one in enumerate(rows):
                start = int(self.filled[row])
                cache[row, :, start : start + len(one)] = fresh[row, :, : len(one)]
            self.put(cache_name, cache)
        self.filled[: len(rows)] += [len(one) for one in rows]
        return self.get("logits", (dims.batch, 1, self.config.output_vocab_size))[:, 0]

    def outputs(self, dims: InferenceDims) -> dict[str, Array]:
        """Every output of the newest step."""
        self.stream.synchronize()
        specs = [spec for spec in self._specs.values() if spec.direction == "output"]
        return {spec.name: self.get(spec.name, spec.resolve(dims)) for spec in specs}

    def close(self) -> None:
        """Free everything."""
        self.engine.close()
        self._memory.close()
        self.stream.close()
