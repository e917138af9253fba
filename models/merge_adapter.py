"""A fine-tune of the shipped model: `python -m models.merge_adapter spoken out/home-spoken`."""

import argparse
import json
from pathlib import Path
from shutil import copytree
from typing import Any, Final

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from models.rewordings import ADAPTERS, BASE, REWORDINGS

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
MODEL_FILE: Final = "model.safetensors"
PREFIX: Final = "base_model.model."

Weights = dict[str, NDArray[Any]]


def config_of(base: str, rank: int, alpha: float, targets: tuple[str, ...]) -> dict[str, Any]:
    """Return adapter_config.json."""
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def merged(weights: Weights, adapter: Path) -> Weights:
    """Return the weights of a model with an adapter folded in, those that it changes in float32."""
    config = json.loads((adapter / CONFIG_FILE).read_text("utf-8"))
    scale = config["lora_alpha"] / config["r"]
    parts = load_file(adapter / WEIGHTS_FILE)
    whole = dict(weights)
    for name, a in parts.items():
        module, kind, _ = name.rsplit(".", 2)
        if kind == "lora_A":
            b = parts[f"{module}.lora_B.weight"].astype(np.float32)
            place = f"{module.removeprefix(PREFIX)}.weight"
            whole[place] = weights[place].astype(np.float32) + scale * (b @ a.astype(np.float32))
    return whole


def write_merged(base: Path, adapter: Path, out: Path) -> None:
    """Write the model of `base` with an adapter folded in as a folder of its own."""
    copytree(base, out)
    save_file(merged(load_file(base / MODEL_FILE), adapter), out / MODEL_FILE, {"format": "pt"})


def main() -> None:
    """Write the shipped model with an adapter folded in."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(REWORDINGS))
    parser.add_argument("out", type=Path, help="the folder to write, which must not exist")
    flags = parser.parse_args()
    write_merged(BASE, ADAPTERS / flags.name, flags.out)


if __name__ == "__main__":
    main()
