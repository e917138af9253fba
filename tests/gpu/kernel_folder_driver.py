"""Engine folders of kernels, driven on a GPU by the loop that drives graphs."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.numpy import load_file

from hearth.runtime.config import WEIGHTS_FILE
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.executor.engine import Binding
from hearth.runtime.executor.kernels.engine import KernelsEngine
from hearth.runtime.tensors.lora import RANK
from hearth.runtime.tensors.profiles import InferenceDims
from hearth.runtime.tensors.registry import (
    TensorSpec,
    build_registry_for_llm,
    build_registry_for_spec_decode_draft,
)
from hearth.runtime.tensors.tensor import Tensor
from hearth.runtime.weights.weights_file import load_layout
from tests.runtime.export.graph_driver import Array, GraphDriver


class FolderDriver(GraphDriver):
    """Steps of one folder; scratch memory and outputs hold numbers that are none before each."""

    device: ClassVar[CudaDevice]
    """Set it before any is made."""
    opened: ClassVar[dict[Path, tuple[Any, ...]]] = {}
    """What was opened of each folder."""

    def _table(self, base: Path) -> Array:
        table: Array = load_file(base / WEIGHTS_FILE)["embedding"]
        return table

    def _open(self, folder: Path) -> Any:
        if folder not in self.opened:
            self.opened[folder] = self._open_folder(folder)
        engine, self._registry, self._weights, self._scratch = self.opened[folder]
        return engine

    def _open_folder(self, folder: Path) -> tuple[Any, ...]:
        config, device = self.config, self.device
        draft = config.base_hidden_dim > 0
        build = build_registry_for_spec_decode_draft if draft else build_registry_for_llm
        registry = build(config)
        weights = load_file(folder / WEIGHTS_FILE)
        tensors: dict[str, Tensor] = {}
        for name in load_layout(folder).taken:
            array = weights[name]
            registry.add_own(TensorSpec(name, "input", array.dtype, array.shape))
            tensors[name] = device.constant(name, array)
        engine = KernelsEngine.open(folder, config, device, registry)
        scratch = device.zeros("scratch", (engine.required_context_memory,), np.dtype(np.uint8))
        engine.set_context_memory(scratch)
        return engine, registry, tensors, scratch

    def _run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        device = self.device
        if "tree_mask" in feeds:
            feeds["packed_mask"] = packed(feeds.pop("tree_mask"))
        if self.config.lora_targets:
            feeds[RANK] = np.array([self.config.max_supported_lora_rank], np.int32)
        batch, seq_len = feeds["attention_pos_id"].shape
        dims = InferenceDims.prefill(batch, seq_len, self.caches["k_cache_0"].shape[2])
        dims = dims._replace(select_len=feeds["last_token_ids"].shape[1])
        arrays = feeds | self.caches
        tensors = self._weights | {name: device.constant(name, a) for name, a in arrays.items()}
        outputs = {}
        for spec in self._registry.specs:
            if spec.direction == "output":
                name = spec.name.removeprefix("present_")
                if name in self.caches:
                    tensors[spec.name] = tensors[name]
                    continue
                nothing = np.full(spec.resolve(dims), np.nan, spec.dtype)
                tensors[spec.name] = outputs[spec.name] = device.constant(spec.name, nothing)
        driver, stream = device.context.driver, device.stream.native
        driver.call("cuMemsetD8Async", self._scratch.address, 0xFF, self._scratch.nbytes, stream)
        self.session.run(tuple(self._bindings(tensors, dims)), device.stream)
        for name in self.caches:
            self.caches[name] = device.read(tensors[name])
        return {name: device.read(tensor) for name, tensor in outputs.items()}

    def _bindings(self, tensors: dict[str, Tensor], dims: InferenceDims) -> list[Binding]:
        made = []
        for io in self.session.io_tensors:
            spec, tensor = self._registry.get(io.name), tensors[io.name]
            shape = tensor.shape if spec is None else spec.resolve(dims)
            assert tensor.dtype == io.dtype, io.name
            assert tensor.shape == shape, io.name
            made.append(Binding(io.name, io.direction, tensor, shape))
        return made


def packed(mask: Array) -> Array:
    """A mask [B, S, S] in bits: int32 [B, S, ceil(S / 32)]."""
    words = -(-mask.shape[-1] // 32) * 32
    wide = np.pad(mask, [(0, 0), (0, 0), (0, words - mask.shape[-1])])
    bits: Array = np.packbits(wide, axis=-1, bitorder="little").view(np.int32)
    return bits
