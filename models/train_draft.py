"""Training of the draft: `python -m models.train_draft --out models/home-draft`."""

import argparse
import os
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from models.draft import (
    TAPS,
    Anchors,
    Base,
    Draft,
    DraftShape,
    Losses,
    Unrolled,
    anchors_of,
    losses_of,
    write_draft,
)
from models.train import (
    Defaults,
    Settings,
    Taken,
    optimizer_of,
    scheduled,
    settings_of,
    training_flags,
)

# The seed is not the base's own: the draft learns from other conversations.
DEFAULTS: Final = Defaults(Path("models/home-draft"), 32768, 3072, 2e-3, seed=100)


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


def _log(taken: Taken, losses: Losses) -> None:
    shares = " ".join(f"{s:.3f}" for s in (losses.right / losses.total.clamp(min=1)).tolist())
    print(
        f"step {taken.step} loss {losses.loss.item():.4f} right {shares} tokens {taken.tokens} "
        f"seconds {taken.seconds:.0f}",
        flush=True,
    )


def train(settings: Settings, base: Base, tokenizer: Tokenizer, unroll: int) -> Draft:
    """Return a draft trained for so many steps or seconds, whichever ends first."""
    torch.manual_seed(settings.seed)
    draft = new_draft(base, DraftShape())
    if settings.device == "cuda":
        base.compile()
    optimizer = optimizer_of(draft, settings.rate, 0.01)
    for taken in scheduled(settings, tokenizer, optimizer):
        losses = _step(draft, base, optimizer, taken.batch, unroll)
        if taken.step % (100 if settings.device == "cuda" else 10) == 0:
            _log(taken, losses)
    return draft


def _flags() -> argparse.Namespace:
    parser = training_flags(__doc__, DEFAULTS)
    parser.add_argument("--base", type=Path, default=Path("models/home"))
    parser.add_argument("--unroll", type=int, default=6, help="tokens drafted in training")
    return parser.parse_args()


def main() -> None:
    """Train the draft of a model folder, and write the draft's folder."""
    flags = _flags()
    settings = settings_of(flags, DEFAULTS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(flags.base / "tokenizer.json"))
    base = Base(flags.base, settings.device)
    write_draft(settings.out, train(settings, base, tokenizer, flags.unroll))


if __name__ == "__main__":
    main()
