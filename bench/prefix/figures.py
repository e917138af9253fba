"""Figures of `bench prefix`; pure."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from bench.spec.verify import divergence
from runtime.request import RowToken

_INSTANT = 1e-9
LEAST_SAVED = 0.9
"""Of the time that the shared tokens take."""


class Round(NamedTuple):
    """Seconds until the first tokens of four prompts, and two replies.

    One is new to the cache and fills it, one begins alike, then comes the same without the cache,
    and what it has of its own alone. `reused` tokens of the second came from the cache; `reply` and
    `reference` are those of the second and the third.
    """

    fill_s: float
    with_s: float
    without_s: float
    own_s: float
    reused: int
    reply: Sequence[RowToken]
    reference: Sequence[RowToken]


class SharedFigures(msgspec.Struct, kw_only=True):
    """So many shared tokens; medians of all rounds.

    `saved_share` is of the time that the shared tokens take, `ttft_ratio` the time to the first
    token over that without a cache, `fill_cost` the same of a prompt that was new. `equal` is the
    share of replies that are the same: bit for bit where `exact`, else but for near-ties.
    `largest_difference` is that of two log probabilities of one token behind equal ones.
    """

    without_ms: float
    with_ms: float
    own_ms: float
    saved_share: float
    ttft_ratio: float
    fill_cost: float
    reused: int
    equal: float
    largest_difference: float


class PrefixFigures(msgspec.Struct, kw_only=True):
    """An engine with a prefix cache; `saved_share` is the lowest of all numbers of shared tokens.

    `bytes_per_token` are those that a token of the cache takes.
    """

    saved_share: float
    ttft_ratio_1024: float | None
    bytes_per_token: float
    equal: float
    exact: bool
    shared: dict[str, SharedFigures]
    dtype: str = ""

    @property
    def within_aim(self) -> bool:
        """True where no reply differs and nine tenths of what is shared are saved."""
        return self.equal == 1.0 and self.saved_share >= LEAST_SAVED


def shared_figures(rounds: Sequence[Round], near_tie: float | None) -> SharedFigures:
    """The figures of some rounds; without a `near_tie` replies are to be equal bit for bit."""
    without, given, own, fill = (
        median(times)
        for times in zip(
            *((one.without_s, one.with_s, one.own_s, one.fill_s) for one in rounds), strict=True
        )
    )
    return SharedFigures(
        without_ms=1000 * without,
        with_ms=1000 * given,
        own_ms=1000 * own,
        saved_share=1 - (given - own) / max(without - own, _INSTANT),
        ttft_ratio=given / without,
        fill_cost=fill / without,
        reused=min(one.reused for one in rounds),
        equal=sum(_equal(one, near_tie) for one in rounds) / len(rounds),
        largest_difference=max(_difference(one) for one in rounds),
    )


def prefix_figures(
    shared: Mapping[int, SharedFigures], bytes_per_token: float, *, exact: bool
) -> PrefixFigures:
    """The figures of all numbers of shared tokens."""
    long = shared.get(1024)
    return PrefixFigures(
        saved_share=min(one.saved_share for one in shared.values()),
        ttft_ratio_1024=None if long is None else long.ttft_ratio,
        bytes_per_token=bytes_per_token,
        equal=min(one.equal for one in shared.values()),
        exact=exact,
        shared={str(tokens): one for tokens, one in shared.items()},
    )


def _equal(one: Round, near_tie: float | None) -> bool:
    parted = divergence(0, one.reply, one.reference)
    if near_tie is not None:
        return parted is None or parted.gap < near_tie
    return parted is None and _difference(one) == 0.0


def _difference(one: Round) -> float:
    """Up to the first token that differs, and without it: nothing behind it can be compared."""
    largest = 0.0
    for ours, other in zip(one.reply, one.reference, strict=False):
        if ours.token_id != other.token_id:
            break
        largest = max(largest, abs((ours.logprob or 0.0) - (other.logprob or 0.0)))
    return largest
