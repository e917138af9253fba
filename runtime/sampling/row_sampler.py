import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.request import RequestOptions, check_options
from hearth.runtime.sampling.ranking import leading, ranked


class TokenCounts:
    """Number of occurrences of each token: distinct ids and their counts as growing arrays."""

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


# The nucleus is first sought among tokens within this distance (natural log) of the likeliest.
_NEAR = np.float32(-4)
# If that is too little, scores are counted in this many bins, so many to a unit.
_BINS = 1024
_BINS_PER_UNIT = 32


def kept_tokens(scores: NDArray[np.float32], params: RequestOptions) -> NDArray[np.intp] | None:
    """Ids that pass top-k, top-p and min-p, ascending; None means every id.

    `scores` [V] are already divided by the temperature, and the highest of them is 0.
    """
    kept: NDArray[np.intp] | None = None
    if 0 < params.top_k < scores.size:
        kept = leading(scores, params.top_k)
        if params.top_p < 1:
            kept = kept[: _nucleus_size(np.exp(scores[kept]), params.top_p)]
    elif params.top_p < 1:
        kept = _nucleus(scores, params.top_p)
    if params.min_p > 0:
        kept = _likely(scores, kept, params.min_p)
    return None if kept is None else np.sort(kept)


def _nucleus(scores: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """The shortest ranking whose probability reaches `top_p` (Holtzman et al., ICLR 2020).

    Only the tokens around its end are ranked: what certainly belongs to it needs no order.
    """
    weights = np.exp(scores)
    wanted = top_p * float(weights.sum(dtype=np.float64))
    certain, edge = np.empty(0, np.intp), np.flatnonzero(scores >= _NEAR)
    if weights[edge].sum(dtype=np.float64) < wanted:
        certain, edge = _around_mass(scores, weights, wanted)
        wanted -= float(weights[certain].sum(dtype=np.float64))
    order = ranked(scores[edge], edge)
    mass = np.cumsum(weights[order], dtype=np.float64)
    return np.concatenate((certain, order[: int(mass.searchsorted(wanted)) + 1]))


def _around_mass(
    scores: NDArray[np.float32], weights: NDArray[np.float32], wanted: float
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Ids of the bins above, and ids of the bin in which the cumulative weight is `wanted`."""
    last = np.float32(_BINS - 1)
    bins = np.minimum(scores * np.float32(-_BINS_PER_UNIT), last).astype(np.intp)
    mass = np.cumsum(np.bincount(bins, weights=weights))
    edge = int(mass.searchsorted(wanted))
    return np.flatnonzero(bins < edge), np.flatnonzero(bins == edge)


def _nucleus_size(weights: NDArray[np.float32], top_p: float) -> int:
    """Return how many of the ranked `weights` reach the share `top_p` of their sum; at least 1."""
    mass = np.cumsum(weights, dtype=np.float64)
    return int(mass.searchsorted(top_p * mass[-1])) + 1


def _likely(
    scores: NDArray[np.float32], kept: NDArray[np.intp] | None, min_p: float
) -> NDArray[np.intp]:
    """Ids of `kept` at least `min_p` times as likely as the likeliest (Nguyen et al., 2024)."""
    if kept is None:
        return np.flatnonzero(np.exp(scores) >= min_p)
    return kept[np.exp(scores[kept]) >= min_p]


TokenMasks = Sequence[NDArray[np.uint32] | None]
"""Mask of each row, None for a row without one; an empty sequence where no row has any."""


def allowed_tokens(mask: NDArray[np.uint32], vocab_size: int) -> NDArray[np.intp]:
    """Ids below `vocab_size` that a mask [V / 32, rounded up] allows, ascending."""
    # Few words have bits where a grammar leaves little choice.
    words = np.flatnonzero(mask)
    bits = np.unpackbits(mask[words].astype("<u4").view(np.uint8), bitorder="little")
    places = np.flatnonzero(bits)
    ids: NDArray[np.intp] = words[places >> _WORD_SHIFT] * _WORD_BITS + places % _WORD_BITS
    return ids[: ids.searchsorted(vocab_size)]


_WORD_BITS, _WORD_SHIFT = 32, 5
_SUM_BLOCK = 1024
_SMALLEST = float(np.finfo(np.float32).tiny)


def tempered(
    scores: NDArray[np.float32], highest: float, temperature: float
) -> NDArray[np.float32]:
    """(score - highest score) / temperature, [V]: at most 0, so that its exponential is a weight.

    A temperature below the smallest normal float32 counts as that; a quotient that overflows is
    -inf, whose weight is 0.
    """
    relative: NDArray[np.float32] = scores - np.float32(highest)
    relative /= np.float32(max(temperature, _SMALLEST))
    return relative


def draw(scores: NDArray[np.float32], params: RequestOptions, uniform: float) -> int:
    """Filter tempered `scores` [V] and sample the token at `uniform`, a number in [0, 1)."""
    kept = kept_tokens(scores, params)
    if kept is None:
        return invert(np.exp(scores), uniform)
    return int(kept[invert(np.exp(scores[kept]), uniform)])


def invert(weights: NDArray[np.float32], uniform: float) -> int:
    """The first index whose cumulative weight exceeds `uniform` times the sum of `weights` [n].

    Sums run over blocks of 1,024 weights and then within the block that is hit, in float64; a
    token of weight 0 is never sampled (inversion, Devroye 1986, section III.2).
    """
    if weights.size <= _SUM_BLOCK:
        mass = np.cumsum(weights, dtype=np.float64)
        return _first_above(mass, uniform * mass[-1])
    starts = np.arange(0, weights.size, _SUM_BLOCK)
    blocks = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = uniform * blocks[-1]
    block = _first_above(blocks, target)
    first = block * _SUM_BLOCK
    mass = np.cumsum(weights[first : first + _SUM_BLOCK], dtype=np.float64)
    return first + _first_above(mass, target - (blocks[block - 1] if block else 0.0))


def _first_above(mass: NDArray[np.float64], target: float) -> int:
    # Rounding may carry the target up to the last sum; the largest number below that is meant.
    target = min(target, math.nextafter(mass[-1], 0.0))
    return int(mass.searchsorted(target, side="right"))


_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
_BLOCK = 64


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Four random 32-bit words for each counter: [..., 4] and a key [2] to words [..., 4].

    Every word is below 2**32 and held in uint64, whose products are then exact. The generator
    is Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
    1, 2, 3", SC 2011, section 4.3.
    """
    even, odd = counter[..., 0::2], counter[..., 1::2]
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        even = (product[..., ::-1] >> _HALF) ^ odd ^ key
        odd = product[..., ::-1] & _MASK
        key = (key + _WEYL) & _MASK
    return np.stack((even, odd), axis=-1).reshape(counter.shape)


def uniforms(seed: int, first: int, count: int) -> NDArray[np.float64]:
    """Numbers [count] in [0, 1) with 53 random bits for the positions from `first` on.

    The seed (64 bits, low word first) is the key; the counter is the position in its two low
    words and zero in the others.
    """
    positions = np.arange(first, first + count, dtype=np.uint64)
    counter = np.zeros((count, 4), np.uint64)
    counter[:, 0] = positions & _MASK
    counter[:, 1] = positions >> _HALF
    words = philox4x32(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint64))
    bits = (words[:, 0] >> np.uint64(5) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers


class UniformSource:
    """The uniform number of each position for one seed, computed in aligned blocks."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = -1
        self._numbers = np.empty(0)

    def at(self, position: int) -> float:
        """The number in [0, 1) that belongs to `position`, whatever was asked before."""
        first = position - position % _BLOCK
        if first != self._first:
            self._numbers = uniforms(self._seed, first, _BLOCK)
            self._first = first
        return float(self._numbers[position - first])


class RowSampler:
    """The settings and token history of one row; raises `invalid_value` naming the setting.

    `token_ids` is the prompt and what is generated so far, `prompt_length` tokens of it prompt,
    and `vocab_size` the number of logits. A sampler made from a longer history continues as one
    that has accepted the same tokens one by one.
    """

    def __init__(
        self,
        params: RequestOptions,
        token_ids: Sequence[int],
        prompt_length: int,
        vocab_size: int,
    ) -> None:
        check_options(params, vocab_size)
        self.params = params
        self._adjustment = ScoreAdjustment(params, token_ids, token_ids[prompt_length:], vocab_size)
        self._uniforms = UniformSource(params.seed or 0)

    def accept(self, token_id: int) -> None:
        """Add the sampled token to the row's history."""
        if self._adjustment.active:
            self._adjustment.accept(token_id)

    def pick(
        self,
        logits: NDArray[np.float32],
        best: int,
        position: int,
        mask: NDArray[np.uint32] | None = None,
    ) -> int | None:
        """The token for `position` from finite `logits` [V] whose argmax is `best`.

        None when penalties and bias have carried the highest score out of float32, or the mask
        allows no token.
        """
        scores, ids = logits, None
        if self._adjustment.active:
            scores = self._adjustment.apply(logits)
            best = int(scores.argmax())
        if mask is not None:
            # From here on there are no other tokens, and a token is its place among these.
            ids = allowed_tokens(mask, logits.size)
            if not ids.size:
                return None
            scores = scores[ids]
            best = int(scores.argmax())
        highest = float(scores[best])
        if not np.isfinite(highest):
            return None
        token = best
        if self.params.temperature != 0:
            relative = tempered(scores, highest, self.params.temperature)
            token = draw(relative, self.params, self._uniforms.at(position))
        return token if ids is None else int(ids[token])
