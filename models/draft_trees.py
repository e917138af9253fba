"""Accepted tokens of a tree of proposals, for every anchor of a text at once.

Greedy verification reproduces the base's own text, so a draft's tree can be judged from that text
alone: a node is accepted if its path is the text's and it is among the nodes that are verified.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.draft_loss import Unrolled, at
from models.draft_model import Entries


class TreeShape(NamedTuple):
    """Candidates kept at each depth, the depth, and the nodes verified, root included."""

    top_k: int
    steps: int
    size: int


class _Beams(NamedTuple):
    """The candidates that are drafted on, [B, A, K]: token, score, and whether it is the text."""

    tokens: Tensor
    scores: Tensor
    true: Tensor


class _Table:
    """All scored nodes of the trees, and by depth the score of the node that is the text's."""

    def __init__(self) -> None:
        self._scores: list[Tensor] = []
        self._true: list[Tensor] = []

    def add(self, beams: _Beams) -> None:
        self._scores.append(beams.scores)
        found = beams.scores.masked_fill(~beams.true, -torch.inf)
        self._true.append(found.max(-1).values)

    def accepted(self, size: int) -> Tensor:
        """Return [B, A]: the depth down to which the text is within the best `size` nodes."""
        table, true = torch.cat(self._scores, -1), torch.stack(self._true, -1)
        better = (table[..., None, :] > true[..., None]).sum(-1)
        inside = true.isfinite() & (better < size - 1)
        return inside.long().cumprod(-1).sum(-1)


def _top(logits: Tensor, wanted: Tensor, top_k: int) -> _Beams:
    """Return the best tokens of logits [..., V] beside the token [...] that the text has."""
    scores, tokens = logits.float().log_softmax(-1).topk(top_k, -1)
    return _Beams(tokens, scores, tokens == wanted[..., None])


def _children(parents: _Beams, own: _Beams) -> _Beams:
    """Return the K·K children [B, A, K·K] with scores and truth summed along their paths."""
    shape = (*parents.tokens.shape, -1)
    scores = own.scores.reshape(shape) + parents.scores[..., None]
    true = own.true.reshape(shape) & parents.true[..., None]
    return _Beams(*(part.flatten(2) for part in (own.tokens.reshape(shape), scores, true)))


def _select(values: Tensor, parent: Tensor) -> Tensor:
    """Return values [B, A·K, ...] of the parents [B, A, K] of each anchor."""
    _, anchors, width = parent.shape
    first = torch.arange(anchors, device=parent.device)[:, None] * width
    return at(values, (first + parent).flatten(1))


def accepted(unrolled: Unrolled, entry: Tensor, shape: TreeShape) -> Tensor:
    """Return [B, A]: how many drafted tokens after these base-fed entries the text contains.

    The trees are EAGLE-2's: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic
    Draft Trees", 2024, section 4.
    """
    k, ids, logits = shape.top_k, unrolled.ids, unrolled.draft.logits

    def text(depth: int) -> Tensor:
        return at(ids, torch.clamp(entry + 1 + depth, max=ids.shape[1] - 1))

    table = _Table()
    first = unrolled.first(entry)
    beams = _top(logits(first), text(1), k)
    table.add(beams)
    x, chain = first.repeat_interleave(k, 1), None
    anchors = entry.repeat_interleave(k, 1)
    for depth in range(2, shape.steps + 1):
        x, chain = unrolled.further(beams.tokens.flatten(1), x, anchors, chain)
        wanted = text(depth).repeat_interleave(k, 1)
        children = _children(beams, _top(logits(x), wanted, k))
        table.add(children)
        scores, best = children.scores.topk(k, -1)
        beams = _Beams(children.tokens.gather(-1, best), scores, children.true.gather(-1, best))
        x = _select(x, best // k)
        chain = Entries(*(_select(part, best // k) for part in chain))
    return table.accepted(shape.size)
