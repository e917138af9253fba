"""What a step costs in which one half of the rows speculates and the other does not."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec
from msgspec import structs

from bench.batches import rows_of, run_batch
from bench.spec.contest import Progress, batches
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.errors import HearthError
from runtime.request import RequestOptions

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
