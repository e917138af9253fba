"""Training of the draft: `python -m models.train_draft --out models/home-draft`."""

import argparse
import os
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from models.draft_base import Base
from models.draft_folder import write_draft
from models.draft_loss import Anchors, Losses, Unrolled, anchors_of, losses_of
from models.draft_model import TAPS, Draft, DraftShape
from models.train import Settings, Stream, rate_at


def new_draft(base: Base, shape: DraftShape) -> Draft:
    """Return a draft that starts as the base's highest tap under the base's norm and head."""
    draft = Draft(shape)
    hidden = shape.hidden
    with torch.no_grad():
        draft.fc.weight.zero_()
        draft.fc.weight[:, (len(TAPS) - 1) * hidden :] = torch.eye(hidden)
        draft.norm.weight.copy_(base.model.model.norm.weight)
        draft.lm_head.weight.copy_(base.embedding)
        draft.midlayer.self_attn.o_proj.weight.zero_()
        draft.midlayer.mlp.down_proj.weight.zero_()
    draft.to(base.device)
    return draft


def _optimizer(draft: Draft, rate: float) -> torch.optim.AdamW:
    matrices = [p for p in draft.parameters() if p.ndim > 1]
    vectors = [p for p in draft.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def _step(
    draft: Draft,
    base: Base,
    optimizer: torch.optim.AdamW,
    batch: list[torch.Tensor],
    unroll: int,
) -> Losses:
    ids = batch[0].to(base.device, non_blocking=True)
    anchors = Anchors(*(part.to(base.device) for part in anchors_of(batch[1])))
    reading = base.read(ids)
    with torch.autocast(base.device, torch.bfloat16, enabled=base.device == "cuda"):
        unrolled = Unrolled(draft, base.embedding, ids, reading.taps)
        losses = losses_of(unrolled, reading.logits, anchors, unroll)
    optimizer.zero_grad(set_to_none=True)
    losses.loss.backward()
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    optimizer.step()
    return losses


def _log(step: int, losses: Losses, seen: int, took: float) -> None:
    shares = " ".join(f"{s:.3f}" for s in (losses.right / losses.total.clamp(min=1)).tolist())
    print(
        f"step {step} loss {losses.loss.item():.4f} right {shares} tokens {seen} "
        f"seconds {took:.0f}",
        flush=True,
    )


def train(settings: Settings, base: Base, tokenizer: Tokenizer, unroll: int) -> Draft:
    """Return a draft trained for so many steps or seconds, whichever ends first."""
    torch.manual_seed(settings.seed)
    draft = new_draft(base, DraftShape())
    if settings.device == "cuda":
        base.compile()
    optimizer = _optimizer(draft, settings.rate)
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
            break
        for group in optimizer.param_groups:
            group["lr"] = rate_at(progress, settings)
        losses = _step(draft, base, optimizer, batch, unroll)
        seen += batch[0].numel()
        if step % (100 if settings.device == "cuda" else 10) == 0:
            _log(step, losses, seen, took)
    return draft


def _flags() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("models/home"))
    parser.add_argument("--out", type=Path, default=Path("models/home-draft"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--steps", type=int, help="default: 30000 on a GPU, 2500 on a CPU")
    parser.add_argument(
        "--minutes", type=float, default=60, help="end by then, the schedule being cut to fit"
    )
    parser.add_argument("--unroll", type=int, default=6, help="tokens drafted in training")
    parser.add_argument("--tokens", type=int, help="a batch; default: 32768 or 3072")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, help="default: one for each core but one")
    parser.add_argument("--seed", type=int, default=100, help="100: not the base's own stream")
    return parser.parse_args()


def _settings(flags: argparse.Namespace) -> Settings:
    big = flags.device == "cuda"
    return Settings(
        out=flags.out,
        device=flags.device,
        steps=flags.steps or (30000 if big else 2500),
        seconds=flags.minutes * 60,
        tokens=flags.tokens or (32768 if big else 3072),
        rate=flags.rate,
        workers=flags.workers if flags.workers is not None else max(1, (os.cpu_count() or 2) - 1),
        seed=flags.seed,
    )


def main() -> None:
    """Train the draft of a model folder, and write the draft's folder."""
    flags = _flags()
    settings = _settings(flags)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(flags.base / "tokenizer.json"))
    base = Base(flags.base, settings.device)
    write_draft(settings.out, train(settings, base, tokenizer, flags.unroll))


if __name__ == "__main__":
    main()
