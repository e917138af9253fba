"""Small random adapters in PEFT's format, and the same merged into their base."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from runtime.export.model_config import ModelConfig, load_model_config

ALL = ("q", "k", "v", "o", "gate", "up", "down")


def write_peft(
    base: Path,
    target: Path,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: tuple[str, ...] = ALL,
    dtype: Any = np.float32,
    prefix: str = "base_model.model.model",
    seed: int = 0,
    **fields: Any,
) -> Path:
    """Write an adapter for the Hugging Face folder `base` into `target`, which is returned.

    `fields` are put into adapter_config.json.
    """
    model, random = load_model_config(base), np.random.default_rng(seed)
    tensors = {}
    for layer in range(model.num_layers):
        for one in targets:
            wide, size = _shape(model, one)
            block = "mlp" if one in {"gate", "up", "down"} else "self_attn"
            name = f"{prefix}.layers.{layer}.{block}.{one}_proj"
            a, b = random.standard_normal((rank, wide)), random.standard_normal((size, rank))
            tensors[f"{name}.lora_A.weight"] = (a * wide**-0.5).astype(dtype)
            tensors[f"{name}.lora_B.weight"] = (b * 0.3 * rank**-0.5).astype(dtype)
    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors")
    config = {
        "base_model_name_or_path": base.name,
        "bias": "none",
        "lora_alpha": alpha,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": [f"{one}_proj" for one in targets],
        "task_type": "CAUSAL_LM",
    }
    (target / "adapter_config.json").write_text(json.dumps(config | fields))
    return target


def merge(base: Path, adapter: Path, target: Path) -> Path:
    """A copy of `base`, a folder of one weight file, whose weights hold the adapter."""
    shutil.copytree(base, target)
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    weights = {
        name: np.array(value) for name, value in load_file(base / "model.safetensors").items()
    }
    parts = load_file(adapter / "adapter_model.safetensors")
    for name, a in parts.items():
        if ".lora_A." not in name:
            continue
        b = parts[name.replace(".lora_A.", ".lora_B.")]
        layer = name.split(".layers.")[1].removesuffix(".lora_A.weight")
        (stored,) = (one for one in weights if one.endswith(f".layers.{layer}.weight"))
        product = np.asarray(b, np.float64) @ np.asarray(a, np.float64) * scale
        weights[stored] = (weights[stored] + product).astype(np.float32)
    save_file(weights, target / "model.safetensors")
    return target


def change_fields(adapter: Path, **fields: Any) -> None:
    """Replace fields of adapter_config.json."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(adapter: Path, change: Any) -> None:
    """Rewrite the tensors of an adapter after changing them."""
    path = adapter / "adapter_model.safetensors"
    tensors: dict[str, NDArray[Any]] = {k: np.array(v) for k, v in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def _shape(model: ModelConfig, one: str) -> tuple[int, int]:
    hidden, inner = model.hidden_size, model.intermediate_size
    return {
        "q": (hidden, model.query_size),
        "o": (model.query_size, hidden),
        "down": (inner, hidden),
        "gate": (hidden, inner),
        "up": (hidden, inner),
    }.get(one, (hidden, model.kv_size))
