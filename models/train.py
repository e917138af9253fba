"""Training: `python -m models.train --out models/home`."""

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import Qwen3ForCausalLM

from models.folder import new_model, write_folder
from models.stream import Batch, batches, train_tokenizer

WARMUP: Final = 0.03


@dataclass(frozen=True)
class Settings:
    """Settings of one training run."""

    out: Path
    device: str
    steps: int
    seconds: float
    tokens: int
    rate: float
    workers: int
    seed: int


class Defaults(NamedTuple):
    """Defaults of a training's flags; tokens of a batch by device."""

    out: Path
    gpu_tokens: int
    cpu_tokens: int
    rate: float
    seed: int


class Taken(NamedTuple):
    """A batch to be learned from: its number, and the tokens and seconds of the run by then."""

    step: int
    batch: list[torch.Tensor]
    tokens: int
    seconds: float


class Stream(IterableDataset[Batch]):  # type: ignore[misc] # torch has no types here
    """The batches of one worker, from a seed of its own."""

    def __init__(self, tokenizer: Tokenizer, seed: int, budget: int) -> None:
        self._text = tokenizer.to_str()
        self._seed = seed
        self._budget = budget

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches without end."""
        worker = get_worker_info()
        seed = self._seed * 1000 + (worker.id if worker else 0)
        return batches(Tokenizer.from_str(self._text), seed, self._budget)


def rate_at(progress: float, settings: Settings) -> float:
    """Return the learning rate: a linear rise, then half a cosine down to zero."""
    if progress < WARMUP:
        return settings.rate * max(progress, 0.001) / WARMUP
    share = (progress - WARMUP) / (1 - WARMUP)
    return settings.rate * 0.5 * (1 + math.cos(math.pi * share))


def optimizer_of(model: torch.nn.Module, rate: float, decay: float) -> torch.optim.AdamW:
    """Return the optimizer of all parameters; the weights of matrices alone decay."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def scheduled(
    settings: Settings, tokenizer: Tokenizer, optimizer: torch.optim.AdamW
) -> Iterator[Taken]:
    """Yield batches for so many steps or seconds, whichever ends first, at the rate of each."""
    loader = DataLoader(
        Stream(tokenizer, settings.seed, settings.tokens),
        batch_size=None,
        num_workers=settings.workers,
        prefetch_factor=16 if settings.workers else None,
        pin_memory=settings.device == "cuda",
    )
    began, seen = time.monotonic(), 0
    for step, batch in enumerate(loader):
        took = time.monotonic() - began
        progress = max(step / settings.steps, took / settings.seconds)
        if progress >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = rate_at(progress, settings)
        seen += batch[0].numel()
        yield Taken(step, batch, seen, took)


def training_flags(description: str | None, defaults: Defaults) -> argparse.ArgumentParser:
    """Return a parser of the flags that every training has."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=defaults.out)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--steps", type=_count, help="default: 30000 on a GPU, 2500 on a CPU")
    parser.add_argument(
        "--minutes", type=_minutes, default=60, help="end by then, the schedule being cut to fit"
    )
    tokens = f"a batch; default: {defaults.gpu_tokens} or {defaults.cpu_tokens}"
    parser.add_argument("--tokens", type=_count, help=tokens)
    parser.add_argument("--rate", type=float, default=defaults.rate)
    parser.add_argument("--workers", type=int, help="default: one for each core but one")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    return parser


def settings_of(flags: argparse.Namespace, defaults: Defaults) -> Settings:
    """Return what the flags of `training_flags` ask for."""
    big = flags.device == "cuda"
    return Settings(
        out=flags.out,
        device=flags.device,
        steps=flags.steps or (30000 if big else 2500),
        seconds=flags.minutes * 60,
        tokens=flags.tokens or (defaults.gpu_tokens if big else defaults.cpu_tokens),
        rate=flags.rate,
        workers=flags.workers if flags.workers is not None else max(1, (os.cpu_count() or 2) - 1),
        seed=flags.seed,
    )


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _minutes(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return number


DEFAULTS: Final = Defaults(Path("models/home"), 65536, 6144, 3e-3, seed=0)


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the answers' tokens, the only ones that are projected."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = answers[:, 1:]
    logits = model.lm_head(hidden[:, :-1][wanted])
    return torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][wanted])


def _step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, batch: list[torch.Tensor], device: str
) -> torch.Tensor:
    ids, answers = (part.to(device, non_blocking=True) for part in batch)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss = loss_of(model, ids, answers)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def _prepare_gpu(model: Qwen3ForCausalLM) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape of a batch
    for layer in model.model.layers:  # one by one: they share one compiled graph
        layer.compile(dynamic=True)


def train(settings: Settings, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Return a model trained from scratch."""
    torch.manual_seed(settings.seed)
    model = new_model().to(settings.device)
    if settings.device == "cuda":
        _prepare_gpu(model)
    optimizer = optimizer_of(model, settings.rate, 0.1)
    for taken in scheduled(settings, tokenizer, optimizer):
        loss = _step(model, optimizer, taken.batch, settings.device)
        if taken.step % 100 == 0:
            print(
                f"step {taken.step} loss {loss.item():.4f} tokens {taken.tokens} "
                f"seconds {taken.seconds:.0f}",
                flush=True,
            )
    return model


def main() -> None:
    """Train the tokenizer and the model, and write the model folder."""
    settings = settings_of(training_flags(__doc__, DEFAULTS).parse_args(), DEFAULTS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = train_tokenizer(settings.seed)
    model = train(settings, tokenizer)
    write_folder(settings.out, model, tokenizer)


if __name__ == "__main__":
    main()
