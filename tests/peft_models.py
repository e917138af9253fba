"""Random adapters (`tests.low_rank_models`) in PEFT's format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.low_rank_models import MODULES, Array, random_adapter


def write_peft(
    base: Path,
    target: Path,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str = "",
    seed: int = 0,
    dtype: Any = np.float32,
    prefix: str = "base_model.model.model",
    **fields: Any,
) -> Path:
    """Write the adapter `random_adapter(base, rank, ...)` into the folder `target`, returned.

    `fields` are put into adapter_config.json.
    """
    scale = alpha / (rank**0.5 if fields.get("use_rslora") else rank)
    tensors, modules = {}, set()
    for (layer, kind), (a, b) in random_adapter(base, rank, targets=targets, seed=seed).items():
        name = f"{prefix}.layers.{layer}.{MODULES[kind]}"
        modules.add(MODULES[kind].split(".")[1])
        tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(a.T.astype(dtype))
        tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray((b.T / scale).astype(dtype))
    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors")
    config = {
        "base_model_name_or_path": base.name,
        "bias": "none",
        "lora_alpha": alpha,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "target_modules": sorted(modules),
        "task_type": "CAUSAL_LM",
    }
    (target / "adapter_config.json").write_text(json.dumps(config | fields))
    return target


def change_fields(adapter: Path, **fields: Any) -> None:
    """Replace fields of adapter_config.json."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(adapter: Path, change: Callable[[dict[str, Array]], object]) -> None:
    """Rewrite the tensors of an adapter after changing them."""
    path = adapter / "adapter_model.safetensors"
    tensors = {name: np.array(value) for name, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
