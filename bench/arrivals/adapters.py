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
from runtime.config import LLMEngineRunnerConfig

MAX_RANK = 4
"""Of the toy engine's adapters."""


def add_adapters(socket: Path, config: LLMEngineRunnerConfig, count: int) -> list[str]:
    """Add `count` adapters to a daemon; their names. Raises HearthError where it takes none."""
    names = [f"adapter-{number}" for number in range(count)]
    with TemporaryDirectory(prefix="hearth-adapters-") as folder:
        for seed, name in enumerate(names):
            source = write_adapter(Path(folder) / name, config, seed)
            ask(AddAdapter(name, str(source)), AdapterAdded, str(socket))
    return names


def write_adapter(folder: Path, config: LLMEngineRunnerConfig, seed: int) -> Path:
    """Write a small random adapter of all queries, as PEFT does, and return its folder."""
    rng = np.random.default_rng(seed)
    rank = min(MAX_RANK, max(1, config.max_supported_lora_rank))
    sizes = {
        "A": (rank, config.hidden_size),
        "B": (config.num_attention_heads * config.head_dim, rank),
    }
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{kind}.weight": (
            rng.standard_normal(shape, dtype=np.float32) * np.float32(0.01)
        )
        for layer in range(config.num_decoder_layers)
        for kind, shape in sizes.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def spread(asks: Sequence[Ask], names: Sequence[str]) -> list[Ask]:
    """The same requests, each with one of these adapters by chance, always the same one."""
    if not names:
        return list(asks)
    rng = random.Random(len(names))  # noqa: S311 - a choice, not a secret
    return [one._replace(adapter=rng.choice(names)) for one in asks]
