"""What a step costs in which one half of the rows speculates and the other does not."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from bench.spec.contest import Progress
from bench.spec.runs import batches, greedy_rows, run_batch
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.errors import HearthError

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
        rows = [
            row
            for prompt, wish in zip(prompts, self.wishes, strict=True)
            for row in greedy_rows([prompt], tokens, speculation=wish, ignore_eos=True)
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
