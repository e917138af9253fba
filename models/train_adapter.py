"""Training of an adapter, on a CPU: `python -m models.train_adapter spoken`."""

import argparse
import math
import time
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from models.adapter_stream import adapter_batches
from models.lora import LoRALinear, attach, read_matrices, write_adapter
from models.peft_folder import config_of
from models.rewordings import ADAPTERS, BASE, REWORDINGS, Rewording
from models.train import loss_of

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
