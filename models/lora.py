"""Adapters while they are trained: thin matrices beside a frozen model's projections.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, https://arxiv.org/abs/2106.09685
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.peft_folder import CONFIG_FILE, PREFIX, WEIGHTS_FILE


class LoRALinear(torch.nn.Module):  # type: ignore[misc] # torch has no types here
    """A frozen projection [out, in] and `scale * B A` beside it: A [rank, in], B [out, rank]."""

    def __init__(self, base: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base
        self.scale = scale
        self.lora_A = torch.nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = torch.nn.Parameter(torch.zeros(base.out_features, rank))
        torch.nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the adapted projection [..., out] of x [..., in]."""
        thin = torch.nn.functional.linear(x, self.lora_A) * self.scale
        whole: torch.Tensor = self.base(x) + torch.nn.functional.linear(thin, self.lora_B)
        return whole


def attach(
    model: torch.nn.Module, rank: int, alpha: float, targets: tuple[str, ...]
) -> dict[str, LoRALinear]:
    """Freeze the model and put an adapter beside each projection of these names; by module."""
    model.requires_grad_(requires_grad=False)
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets
    }
    adapters = {name: LoRALinear(module, rank, alpha / rank) for name, module in found.items()}
    for name, adapter in adapters.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, adapter)
    return adapters


def write_adapter(out: Path, adapters: dict[str, LoRALinear], config: dict[str, Any]) -> None:
    """Write the folder, with the matrices in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {
        f"{PREFIX}{name}.{part}.weight": getattr(adapter, part).detach().to(torch.bfloat16)
        for name, adapter in adapters.items()
        for part in ("lora_A", "lora_B")
    }
    save_file(weights, out / WEIGHTS_FILE, {"format": "pt"})


def read_matrices(folder: Path, adapters: dict[str, LoRALinear]) -> None:
    """Let adapters begin as the one in a folder, which is of their shape."""
    weights = load_file(folder / WEIGHTS_FILE)
    for name, adapter in adapters.items():
        adapter.lora_A.data = weights[f"{PREFIX}{name}.lora_A.weight"].float()
        adapter.lora_B.data = weights[f"{PREFIX}{name}.lora_B.weight"].float()
