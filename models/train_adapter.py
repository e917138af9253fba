"""Training of an adapter, on a CPU: `python -m models.train_adapter spoken`.

Thin matrices stand beside a frozen model's projections.
Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, https://arxiv.org/abs/2106.09685
"""

import argparse
import json
import math
import time
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from models.merge_adapter import CONFIG_FILE, PREFIX, WEIGHTS_FILE, config_of
from models.rewordings import ADAPTERS, BASE, REWORDINGS, Rewording, adapter_batches
from models.train import loss_of


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


RANK: Final = 8
ALPHA: Final = 16.0
TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_WARMUP: Final = 20


def rate_at(step: int, steps: int, rate: float) -> float:
    """Return the learning rate: a linear rise under half a cosine down to zero."""
    return rate * min(1, (step + 1) / _WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(
    rewording: Rewording, steps: int, rate: float, seed: int, start: Path | None = None
) -> dict[str, LoRALinear]:
    """Return an adapter of the shipped model that rewords its actions; `start` is what it was."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    adapters = attach(model, RANK, ALPHA, TARGETS)
    if start is not None:
        read_matrices(start, adapters)
    learned = [matrix for matrix in model.parameters() if matrix.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    began = time.monotonic()
    for step, batch in enumerate(islice(adapter_batches(tokenizer, rewording, seed), steps)):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, rate)
        loss = loss_of(model, torch.from_numpy(batch.ids), torch.from_numpy(batch.answers))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        if step % 10 == 0:
            took = time.monotonic() - began
            print(f"step {step} loss {loss.item():.4f} seconds {took:.0f}", flush=True)
    return adapters


def main() -> None:
    """Train one adapter and write its folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(REWORDINGS))
    parser.add_argument("--out", type=Path, help="default: its folder in models/home-adapters")
    parser.add_argument("--start", type=Path, help="the folder of an adapter to go on from")
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--rate", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    adapters = train(REWORDINGS[flags.name], flags.steps, flags.rate, flags.seed, flags.start)
    config = config_of(BASE.name, RANK, ALPHA, TARGETS)
    write_adapter(flags.out or ADAPTERS / flags.name, adapters, config)


if __name__ == "__main__":
    main()
