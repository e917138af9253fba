"""Random adapters for a daemon that is measured, and requests that ask for them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from bench.arrivals.workload import Ask
from daemon.control.client import ask
from daemon.control.messages import AdapterAdded, AddAdapter
from runtime.adapters.adapter import projection_shapes
from runtime.config import LLMEngineRunnerConfig

MAX_RANK = 4
"""Of the toy engine's adapters."""
_OF_MLP = ("gate", "up", "down")


def add_adapters(socket: Path, config: LLMEngineRunnerConfig, count: int) -> list[str]:
    """Add `count` adapters to a daemon; their names. Raises HearthError where it takes none."""
    names = [f"adapter-{number}" for number in range(count)]
    with TemporaryDirectory(prefix="hearth-adapters-") as folder:
        for seed, name in enumerate(names):
            source = write_adapter(Path(folder) / name, config, seed)
            ask(AddAdapter(name, str(source)), AdapterAdded, str(socket))
    return names


def write_adapter(
    folder: Path, config: LLMEngineRunnerConfig, seed: int, targets: Sequence[str] = ("q",)
) -> Path:
    """Write a small random adapter of these projections, as PEFT does, and return its folder."""
    rng = np.random.default_rng(seed)
    rank = min(MAX_RANK, max(1, config.max_supported_lora_rank))
    tensors = {}
    for (layer, target), (width, size) in projection_shapes(config).items():
        block = "mlp" if target in _OF_MLP else "self_attn"
        name = f"base_model.model.model.layers.{layer}.{block}.{target}_proj.lora"
        for kind, shape in (("A", (rank, width)), ("B", (size, rank))):
            if target in targets:
                numbers = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.01)
                tensors[f"{name}_{kind}.weight"] = numbers
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [f"{target}_proj" for target in targets]
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def spread(asks: Sequence[Ask], names: Sequence[str]) -> list[Ask]:
    """The same requests, each with one of these adapters by chance, always the same one."""
    if not names:
        return list(asks)
    rng = random.Random(len(names))  # noqa: S311 - a choice, not a secret
    return [one._replace(adapter=rng.choice(names)) for one in asks]
