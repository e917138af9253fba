"""Speculation against vanilla decoding: the same prompts, the same process, in turns."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import count, zip_longest
from operator import eq
from statistics import fmean, median
from typing import NamedTuple

import msgspec
from msgspec import structs

from hearth.bench.batches import BatchRun, rows_of, run_batch
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import RequestOptions, RowToken
from hearth.runtime.speculation.policy import EagleGenerationMetrics

LEAST_SPEEDUP = 0.97
"""Greatest cost of speculation, at any batch size."""
Progress = Callable[[int, int], None]


class SpecFigures(msgspec.Struct, kw_only=True):
    """One case: greedy replies, tokens after the first of each, times of the host's clock.

    `accept_length` is the tokens a verification of one row, None where nothing was verified;
    `accept_rates[i]` how often a verification gave more than i of them. `speedup` compares the
    speed of generation, `speedup_with_prefill` that of whole replies: medians over the repeats.
    `round_share` is the share of generation steps that were rounds. Steps and the stages of a
    round are milliseconds of the whole batch. `equal_replies` is the share of prompts with the
    same tokens both ways.
    """

    accept_length: float | None
    speedup: float
    vanilla_tokens_per_s: float
    tokens_per_s: float
    speedup_with_prefill: float
    batch: int
    prompts: int
    equal_replies: float
    rounds: int
    drafted: int
    accept_rates: list[float]
    round_share: float
    vanilla_step_ms: float
    draft_ms: float | None = None
    verify_ms: float | None = None
    commit_ms: float | None = None
    dtype: str = ""


class Repeat(NamedTuple):
    """All prompts once both ways, in the same batches."""

    vanilla: list[BatchRun]
    speculating: list[BatchRun]

    @property
    def equal(self) -> float:
        """The share of prompts with the same tokens both ways."""
        one, other = ([ids for run in runs for ids in run.token_ids] for runs in self)
        return fmean(map(eq, one, other))


def tokens_per_s(runs: Sequence[BatchRun], *, prefill: bool = False) -> float:
    """The speed of generation, with or without the time of the prefill."""
    seconds = sum(run.generation_s + (run.prefill_s if prefill else 0.0) for run in runs)
    return sum(run.generated for run in runs) / seconds


def measure_contest(
    ways: tuple[LLMInferenceRuntime, LLMInferenceRuntime],
    prompts: Sequence[list[int]],
    batch: int,
    *,
    max_tokens: int,
    repeats: int,
    progress: Progress,
) -> SpecFigures:
    """Run all prompts `repeats` times in batches of `batch`, without and with speculation in turns.

    Two runtimes of one model, the second speculates. One time before is not counted: there a
    policy learns which way is faster.
    """
    groups = list(batches(prompts, batch))
    options = RequestOptions(max_tokens=max_tokens)
    done, total = count(1 - len(groups)), repeats * len(groups)

    def once() -> Repeat:
        found = Repeat([], [])
        for number, group in enumerate(groups):
            # Who goes first changes, so that neither finds always warm or always cold caches.
            for way in (1, 0) if number % 2 else (0, 1):
                found[way].append(run_batch(ways[way], rows_of(group, options)))
            progress(max(0, next(done)), total)
        return found

    once()
    before = deepcopy(ways[1].speculation_metrics)
    found = [once() for _ in range(repeats)]
    return spec_figures(batch, found, metrics_since(before, ways[1].speculation_metrics))


def batches(prompts: Sequence[list[int]], size: int) -> Iterator[list[list[int]]]:
    """The prompts in batches of `size`; what does not fill one is left out."""
    for first in range(0, len(prompts) - size + 1, size):
        yield list(prompts[first : first + size])


def metrics_since(
    before: EagleGenerationMetrics, now: EagleGenerationMetrics
) -> EagleGenerationMetrics:
    """Rounds and tokens of speculation between two readings of its counters."""
    counts = msgspec.structs.asdict(now)
    positions = zip_longest(now.accepted_by_position, before.accepted_by_position, fillvalue=0)
    del counts["accepted_by_position"]
    return EagleGenerationMetrics(
        **{name: count - getattr(before, name) for name, count in counts.items()},
        accepted_by_position=[count - old for count, old in positions],
    )


def spec_figures(
    batch: int, repeats: Sequence[Repeat], metrics: EagleGenerationMetrics
) -> SpecFigures:
    """The figures of one case, from its repeats and what rounds did in them."""
    vanilla, ours = ([one[way] for one in repeats] for way in (0, 1))
    steps = [step.kind for runs in ours for run in runs for step in run.steps]
    per_round = 1000 / metrics.steps if metrics.steps else None
    return SpecFigures(
        accept_length=metrics.accept_length if metrics.rounds else None,
        speedup=_median_ratio(ours, vanilla),
        vanilla_tokens_per_s=median(map(tokens_per_s, vanilla)),
        tokens_per_s=median(map(tokens_per_s, ours)),
        speedup_with_prefill=_median_ratio(ours, vanilla, prefill=True),
        batch=batch,
        prompts=sum(len(run.rows) for run in vanilla[0]),
        equal_replies=fmean(one.equal for one in repeats),
        rounds=metrics.rounds,
        drafted=metrics.drafted,
        accept_rates=metrics.accept_rates,
        round_share=steps.count("verify") / (len(steps) - steps.count("prefill")),
        vanilla_step_ms=1000 * median(map(_step_s, vanilla)),
        draft_ms=per_round and per_round * metrics.draft_s,
        verify_ms=per_round and per_round * metrics.verify_s,
        commit_ms=per_round and per_round * metrics.commit_s,
    )


def _median_ratio(
    ours: Sequence[list[BatchRun]], vanilla: Sequence[list[BatchRun]], *, prefill: bool = False
) -> float:
    return median(
        tokens_per_s(one, prefill=prefill) / tokens_per_s(other, prefill=prefill)
        for one, other in zip(ours, vanilla, strict=True)
    )


def _step_s(runs: Sequence[BatchRun]) -> float:
    steps = sum(step.kind != "prefill" for run in runs for step in run.steps)
    return sum(run.generation_s for run in runs) / steps


MOST_OVER_DEARER = 1.1


class MixedFigures(msgspec.Struct, kw_only=True):
    """Medians of steps with all rows live; `over_dearer` is the mixed one over the dearer other."""

    over_dearer: float
    mixed_step_ms: float
    round_ms: float
    vanilla_step_ms: float
    batch: int
    steps: int


class _Kind(NamedTuple):
    """One kind of batch: which rows speculate, the steps that count for it and their seconds."""

    wishes: list[bool]
    kind: str
    seconds: list[float]

    def run(self, runtime: LLMInferenceRuntime, prompts: Sequence[list[int]], tokens: int) -> None:
        options = RequestOptions(max_tokens=tokens, ignore_eos=True)
        rows = [
            structs.replace(row, options=structs.replace(options, speculation=wish))
            for row, wish in zip(rows_of(prompts, options), self.wishes, strict=True)
        ]
        for step in run_batch(runtime, rows).steps:
            if step.kind == self.kind and step.rows == len(rows):
                self.seconds.append(step.seconds)


def measure_mixed(
    runtime: LLMInferenceRuntime,
    prompts: Sequence[list[int]],
    batch: int,
    *,
    max_tokens: int,
    repeats: int,
    progress: Progress,
) -> MixedFigures:
    """Time steps of batches with no, all and half of the rows speculating, in turns.

    The runtime must speculate whenever it is asked to. Raises `invalid_value` where a kind of
    step never came.
    """
    half = batch // 2
    vanilla = _Kind([False] * batch, "decode", [])
    rounds = _Kind([True] * batch, "verify", [])
    mixed = _Kind([True] * half + [False] * (batch - half), "verify", [])
    kinds = (vanilla, rounds, mixed)
    groups = list(batches(prompts, batch)) * repeats
    for kind in kinds:
        kind.run(runtime, groups[0], max_tokens)
        kind.seconds.clear()
    for number, group in enumerate(groups):
        for kind in kinds:
            kind.run(runtime, group, max_tokens)
        progress(number + 1, len(groups))
    if not all(kind.seconds for kind in kinds):
        raise HearthError("invalid_value", "a kind of step never came: give more prompts", "mixed")
    alone = median(vanilla.seconds), median(rounds.seconds)
    step = median(mixed.seconds)
    return MixedFigures(
        over_dearer=step / max(alone),
        mixed_step_ms=1000 * step,
        round_ms=1000 * alone[1],
        vanilla_step_ms=1000 * alone[0],
        batch=batch,
        steps=len(mixed.seconds),
    )


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
    """Lead of the reference's token over another; infinite where that is not near the top."""
    known = {top.token_id: top.logprob for top in reference.top}
    if reference.logprob is None or token_id not in known:
        return float("inf")
    return reference.logprob - known[token_id]
