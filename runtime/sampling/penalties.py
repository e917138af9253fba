from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from runtime.request import RequestOptions


class TokenCounts:
    """How often each token has occurred: distinct ids and their counts as growing arrays."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(64, np.intp)
        self._counts = np.zeros(64, np.float32)
        for token_id in token_ids:
            self.add(token_id)

    @property
    def ids(self) -> NDArray[np.intp]:
        """Distinct token ids, in the order of their first occurrence."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Occurrences of each of `ids`, at least 1."""
        return self._counts[: len(self._slots)]

    def add(self, token_id: int) -> None:
        """Count one more occurrence."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == self._ids.size:
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token_id
        self._counts[slot] += 1


class ScoreAdjustment:
    """Penalties and bias of one row, with the token history that they need.

    Ids outside 0 to `vocab_size` - 1 have no logit and are not counted.
    """

    def __init__(
        self,
        params: RequestOptions,
        token_ids: Iterable[int],
        generated: Iterable[int],
        vocab_size: int,
    ) -> None:
        self._vocab_size = vocab_size
        self._repetition = np.float32(params.repetition_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._biased = np.array([token_id for token_id, _ in params.logit_bias], np.intp)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        repeats = params.repetition_penalty != 1
        recurs = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._seen = TokenCounts(self._known(token_ids)) if repeats else None
        self._generated = TokenCounts(self._known(generated)) if recurs else None
        self.active = repeats or recurs or self._biased.size > 0

    def accept(self, token_id: int) -> None:
        """Add a generated token to the history."""
        for counts in (self._seen, self._generated):
            if counts is not None and 0 <= token_id < self._vocab_size:
                counts.add(token_id)

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of `logits` [V] with penalties and bias applied."""
        scores: NDArray[np.float32] = logits.copy()
        if self._seen is not None:
            self._repeat(scores, self._seen.ids)
        if self._generated is not None:
            recurring = self._presence + self._frequency * self._generated.counts
            scores[self._generated.ids] -= recurring
        scores[self._biased] += self._bias
        return scores

    def _repeat(self, scores: NDArray[np.float32], seen: NDArray[np.intp]) -> None:
        # Divided when positive, multiplied when negative: Keskar et al., "CTRL", 2019, with the
        # sign rule that every implementation has added since.
        picked = scores[seen]
        scores[seen] = np.where(picked > 0, picked / self._repetition, picked * self._repetition)

    def _known(self, token_ids: Iterable[int]) -> Iterable[int]:
        return (token_id for token_id in token_ids if 0 <= token_id < self._vocab_size)
