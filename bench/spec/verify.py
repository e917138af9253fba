"""Greedy replies with speculation beside those without, up to near-ties of two tokens."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import NamedTuple

import msgspec

from bench.batches import rows_of, run_batch
from bench.spec.contest import metrics_since
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.request import RequestOptions, RowToken

NEAR_TIE = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.1}
"""Distance at which two log probabilities still count as equal, by the engine's type."""
_ALTERNATIVES = 8


class Divergence(msgspec.Struct, frozen=True):
    """Place where a reply parts from its reference, and by how much the reference's token led."""

    prompt: int
    place: int
    gap: float


class VerifyFigures(msgspec.Struct, kw_only=True):
    """One tree shape at one batch size; what follows a near-tie in a reply is not compared.

    `failures` parted elsewhere; a reply that ends too early or late has an infinite gap.
    """

    prompts: int
    equal: int
    near_ties: list[Divergence]
    failures: list[Divergence]
    accept_length: float | None
    rounds: int

    @property
    def largest_gap(self) -> float | None:
        """Greatest gap of the near-ties; None where there is none."""
        return max((one.gap for one in self.near_ties), default=None)

    @property
    def ok(self) -> bool:
        """True where no reply parted but at a near-tie."""
        return not self.failures


class Replies(NamedTuple):
    """The replies of a runtime to all prompts, in order."""

    rows: list[list[RowToken]]
    accept_length: float | None = None
    rounds: int = 0


def replies(
    runtime: LLMInferenceRuntime,
    prompts: Sequence[list[int]],
    batch: int,
    *,
    max_tokens: int,
    logprobs: bool,
    tick: Callable[[], None],
) -> Replies:
    """Greedy replies in batches of `batch`, the last one smaller where they do not fill it.

    With `logprobs` each token has the likely alternatives that a comparison reads.
    """
    found: list[list[RowToken]] = []
    before = deepcopy(runtime.speculation_metrics)
    options = RequestOptions(max_tokens=max_tokens, logprobs=_ALTERNATIVES if logprobs else None)
    for first in range(0, len(prompts), batch):
        found += run_batch(runtime, rows_of(prompts[first : first + batch], options)).rows
        tick()
    metrics = metrics_since(before, runtime.speculation_metrics)
    return Replies(found, metrics.accept_length if metrics.rounds else None, metrics.rounds)


def compare(ours: Replies, reference: Replies, near_tie: float) -> VerifyFigures:
    """The replies beside those of vanilla decoding, which have log probabilities."""
    pairs = zip(ours.rows, reference.rows, strict=True)
    found = [divergence(number, *pair) for number, pair in enumerate(pairs)]
    parted = [one for one in found if one is not None]
    return VerifyFigures(
        prompts=len(found),
        equal=found.count(None),
        near_ties=[one for one in parted if one.gap < near_tie],
        failures=[one for one in parted if one.gap >= near_tie],
        accept_length=ours.accept_length,
        rounds=ours.rounds,
    )


def divergence(
    prompt: int, ours: Sequence[RowToken], reference: Sequence[RowToken]
) -> Divergence | None:
    """Find the place where a reply parts from its reference; None where it does not."""
    for place, (one, other) in enumerate(zip(ours, reference, strict=False)):
        if one.token_id != other.token_id:
            return Divergence(prompt, place, _gap(other, one.token_id))
    if len(ours) != len(reference):
        return Divergence(prompt, min(len(ours), len(reference)), float("inf"))
    return None


def _gap(reference: RowToken, token_id: int) -> float:
    """By how much the reference's token led another; infinite where that is not near the top."""
    known = {top.token_id: top.logprob for top in reference.top}
    if reference.logprob is None or token_id not in known:
        return float("inf")
    return reference.logprob - known[token_id]
