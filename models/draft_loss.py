"""The training-time test: the draft is trained on its own outputs, as it is used.

After Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025, sections 3.1 and 3.2: step 1 reads the base's hidden states, each later
step the draft's own output of the step before, one position on. It attends to the base-fed entries
up to its anchor and to the draft-fed entries between the anchor and itself, which is a diagonal of
the attention matrix for each earlier step. The published training code weighs step k by 0.8^k.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from models.draft_model import Draft, Entries, Query

DECAY: Final = 0.8


class Anchors(NamedTuple):
    """The last base-fed entries of drafts, [B, A], and how many tokens may follow each."""

    entry: Tensor
    room: Tensor


class Losses(NamedTuple):
    """The weighted loss, and by step how many tokens were right, and of how many."""

    loss: Tensor
    right: Tensor
    total: Tensor


def anchors_of(answers: Tensor) -> Anchors:
    """Return every entry whose token is of an answer [B, S] and not its last one.

    Entry p is token p + 1: a draft from it predicts token p + 2 first. Rows with fewer entries
    than the longest end with entries that have no room.
    """
    place = torch.arange(answers.shape[1] - 2, device=answers.device)
    stops = ~(answers[:, 1:-1] & answers[:, 2:])
    stop = torch.where(stops, place, len(place)).flip(1).cummin(1).values.flip(1)
    room = stop - place
    width = max(1, int((~stops).sum(1).max()))
    entry = stops.to(torch.int8).argsort(dim=1, stable=True)[:, :width]
    return Anchors(entry, room.gather(1, entry))


def at(values: Tensor, index: Tensor) -> Tensor:
    """Return the rows [B, A, ...] of values [B, S, ...] at an index [B, A]."""
    shape = (*index.shape, *values.shape[2:])
    return values.gather(1, index.reshape(*index.shape, *[1] * (values.ndim - 2)).expand(shape))


class Unrolled:
    """The draft over one batch: its history of base-fed entries, and step after step."""

    def __init__(self, draft: Draft, embedding: Tensor, ids: Tensor, taps: Tensor) -> None:
        self.draft = draft
        self.ids = ids
        self._embedding = embedding
        self._next = embedding[ids[:, 1:]]
        self._x = draft.fused(taps[:, :-1])
        position = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
        self.history = draft.entries(self._next, self._x, position)

    def first(self, entry: Tensor) -> Tensor:
        """Return the outputs [B, A, H] of base-fed entries [B, A]."""
        query = Query(at(self._next, entry), at(self._x, entry), entry, entry)
        return self.draft.midlayer(query, self.history, None)

    def further(
        self, tokens: Tensor, x: Tensor, entry: Tensor, chain: Entries | None
    ) -> tuple[Tensor, Entries]:
        """Return the outputs of draft-fed tokens [B, A] and the chains with their entries.

        x [B, A, H] is the parents' outputs, `entry` the anchors, the chain that of the parents.
        """
        depth = 1 if chain is None else chain.keys.shape[2] + 1
        query = Query(self._embedding[tokens], x, entry + depth, entry)
        new = self.draft.entries(query.embedding, x, query.position)
        keys, values = (part[:, :, None] for part in new)
        if chain is not None:
            keys = torch.cat((chain.keys, keys), 2)
            values = torch.cat((chain.values, values), 2)
        chain = Entries(keys, values)
        return self.draft.midlayer(query, self.history, chain), chain


def losses_of(unrolled: Unrolled, teacher: Tensor, anchors: Anchors, steps: int) -> Losses:
    """Return the loss over these steps: cross entropy with the base's logits [B, S, V]."""
    ids = unrolled.ids
    entry, chain, hidden = anchors.entry, None, unrolled.first(anchors.entry)
    loss, right, total = hidden.new_zeros(()), [], []
    for step in range(steps):
        last = torch.clamp(entry + step + 1, max=ids.shape[1] - 1)
        if step:
            hidden, chain = unrolled.further(at(ids, last), hidden, entry, chain)
        wanted = anchors.room > step
        target = at(teacher, last)
        logits = unrolled.draft.logits(hidden).float()
        each = -(target.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        count = wanted.sum()
        loss = loss + DECAY**step * (each * wanted).sum() / count.clamp(min=1)
        right.append((wanted & (logits.argmax(-1) == target.argmax(-1))).sum())
        total.append(count)
    return Losses(loss, torch.stack(right), torch.stack(total))
