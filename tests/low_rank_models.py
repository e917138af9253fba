"""Random adapters of the reference models: as inputs of an engine, and in the reference pass."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.reference_pass import RoundedWeights
from hearth.runtime.tensors.lora import lora_inputs
from hearth.runtime.tensors.tensor import numpy_dtype

Array = NDArray[Any]
Adapter = dict[tuple[int, str], tuple[Array, Array]]
"""By layer and target: A [K, r] and B [r, N], whose product is added to the projection."""
MODULES = {target: f"self_attn.{target}_proj" for target in "qkvo"} | {
    target: f"mlp.{target}_proj" for target in ("gate", "up", "down")
}


def random_adapter(model: Path, rank: int, *, targets: str = "", seed: int = 0) -> Adapter:
    """An adapter of all projections of a model, or of `targets`, that changes its logits much."""
    random, adapter = np.random.default_rng(seed), Adapter()
    for name, matrix in _weights(model).items():
        parts = name.split(".")
        target = next((key for key, value in MODULES.items() if value in name), "")
        if not target or parts[-1] != "weight" or (targets and target not in targets.split()):
            continue
        layer = int(parts[parts.index("layers") + 1])
        outputs, inputs = matrix.shape
        a = random.standard_normal((inputs, rank)) * inputs**-0.5
        b = random.standard_normal((rank, outputs)) * 0.3 * rank**-0.5
        adapter[layer, target] = (a.astype(np.float32), b.astype(np.float32))
    return adapter


def merge(model: Path, target: Path, adapter: Adapter) -> Path:
    """A copy of a model whose weights have the adapter added; `target` is returned."""
    target.mkdir(parents=True)
    for path in model.iterdir():
        if not path.name.startswith("model"):
            (target / path.name).write_bytes(path.read_bytes())
    tensors = {name: np.array(value, np.float32) for name, value in _weights(model).items()}
    for (layer, kind), (a, b) in adapter.items():
        suffix = f"layers.{layer}.{MODULES[kind]}.weight"
        (name,) = (name for name in tensors if name.endswith(suffix))
        tensors[name] += (a @ b).T
    save_file(tensors, target / "model.safetensors")
    return target


class AdaptedWeights(RoundedWeights):
    """The weights of an engine, rounded or quantised as it has them, and an adapter beside them."""

    def __init__(
        self, checkpoint: Checkpoint, config: LLMEngineRunnerConfig, adapter: Adapter
    ) -> None:
        super().__init__(checkpoint, config)
        self._added = {
            f"model.layers.{layer}.{MODULES[target]}.weight": pair
            for (layer, target), pair in adapter.items()
        }

    def project(self, x: Array, name: str) -> Array:
        """The product, and what the adapter adds to it."""
        product = super().project(x, name)
        if name in self._added:
            a, b = self._added[name]
            product += x @ a @ b
        return product


def engine_inputs(config: LLMEngineRunnerConfig, adapter: Adapter) -> dict[str, Array]:
    """What an engine binds for an adapter; of rank 0 where it has nothing for a projection.

    An engine of fixed rank gets that one, filled up with zeros.
    """
    bound, dtype = dict[str, Array](), numpy_dtype(config.dtype)
    for pair in lora_inputs(config):
        parts = [adapter.get((pair.layer, target)) for target in pair.targets]
        needed = sum(part[0].shape[1] for part in parts if part)
        rank = pair.rank if pair.fixed else needed
        a = np.zeros((pair.inputs, rank), dtype)
        b = np.zeros((rank, sum(pair.outputs)), dtype)
        begin = 0
        for place, (part, columns) in enumerate(zip(parts, pair.columns, strict=True)):
            if config.backend == "kernels":  # Each target's have a place of their own.
                begin = place * rank // len(parts)
            if part is not None:
                rows = slice(begin, begin + part[0].shape[1])
                a[:, rows], b[rows, columns] = part
                begin = rows.stop
        if pair.transposed:  # And B has what lies along the diagonal alone.
            size = rank // len(parts)
            b = np.concatenate(
                [b[i * size : (i + 1) * size, one].T for i, one in enumerate(pair.columns)]
            )
            a = np.ascontiguousarray(a.T)
        bound |= {pair.a: a, pair.b: b}
    return bound


def _weights(model: Path) -> dict[str, Array]:
    index = model / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
    return {key: value for name in sorted(names) for key, value in load_file(model / name).items()}
