"""Losses of the training: of the answers, and of the things at each merged patch."""

from typing import Final

import torch
from torch import Tensor, nn

from models.vision.drawing import CLASSES
from models.vision.forward import Reader
from models.vision.stream import Batch

DROPPED: Final = 0.15  # pictures whose merged embeddings are left out: deepstack has to tell
NOTHING_SEEN: Final = 0.15  # weight of places where there is nothing
_UNASKED: Final = -100
_FIELDS: Final = 2  # the merged embeddings are asked for kind and colour alone

_functional = nn.functional


class Guide(nn.Module):  # type: ignore[misc] # torch has no types here
    """Auxiliary heads that classify each merged patch; they are used in training alone."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Linear(width, sum(CLASSES if index else CLASSES[:_FIELDS]))
            for index in range(features)
        )
        for field, number in enumerate(CLASSES):
            weight = torch.ones(number)
            weight[0] = NOTHING_SEEN
            self.register_buffer(f"weight{field}", weight)

    def forward(self, features: list[Tensor], seen: Tensor) -> Tensor:
        """Return the mean loss over heads and fields; `seen` [tokens, 6]."""
        losses = []
        for index, (head, feature) in enumerate(zip(self.heads, features, strict=True)):
            classes = CLASSES if index else CLASSES[:_FIELDS]
            for field, part in enumerate(head(feature).float().split(classes, -1)):
                weight = getattr(self, f"weight{field}")
                losses.append(_functional.cross_entropy(part, seen[:, field].long(), weight))
        return torch.stack(losses).mean()


def _answer_loss(reader: Reader, hidden: Tensor, batch: Batch) -> Tensor:
    wanted = batch["ids"][:, 1:].masked_fill(~batch["answers"][:, 1:], _UNASKED)
    logits = reader.logits(hidden[:, :-1]).flatten(0, 1)
    return _functional.cross_entropy(logits, wanted.flatten(), ignore_index=_UNASKED)


def picture_losses(reader: Reader, guide: Guide, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean loss over the tokens of answers about pictures, and that of the guide."""
    features = [part.flatten(0, -2) for part in reader.look(batch["pixels"])]
    guided = guide(features, batch["seen"].flatten(0, 1))
    pictures = len(batch["pixels"])
    main = features[0].view(pictures, -1, features[0].shape[-1])
    kept = torch.rand(pictures, 1, 1, device=main.device) >= DROPPED
    features[0] = (main * kept).flatten(0, 1)
    hidden = reader.read(batch["ids"], batch["positions"], features, batch["where"])
    return _answer_loss(reader, hidden, batch), guided


def text_loss(reader: Reader, batch: Batch) -> Tensor:
    """Return the mean loss over the tokens of answers in conversations without a picture."""
    line = torch.arange(batch["ids"].shape[1], device=batch["ids"].device)
    hidden = reader.read(batch["ids"], line.expand(3, 1, -1), [], line)
    return _answer_loss(reader, hidden, batch)
