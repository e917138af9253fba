"""Speculation against vanilla decoding: the same prompts, the same process, in turns."""

from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from bench.spec_runs import BatchRun, batches, greedy_rows, metrics_since, run_batch
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.drafting.metrics import EagleGenerationMetrics

LEAST_SPEEDUP = 0.97
"""What speculation may cost at most, at any batch size."""
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


class ContenderSums:
    """Tokens, seconds and steps of one contender in one repeat."""

    def __init__(self) -> None:
        self.tokens = self.steps = self.rounds = 0
        self.generation_s = self.whole_s = 0.0

    def add(self, run: BatchRun) -> None:
        """Count a batch."""
        self.tokens += run.generated
        self.generation_s += run.generation_s
        self.whole_s += run.generation_s + run.prefill_s
        self.steps += sum(step.kind != "prefill" for step in run.steps)
        self.rounds += sum(step.kind == "verify" for step in run.steps)

    @property
    def tokens_per_s(self) -> float:
        """The speed of generation."""
        return self.tokens / self.generation_s

    @property
    def whole_tokens_per_s(self) -> float:
        """The speed with the prefill."""
        return self.tokens / self.whole_s


class Repeat:
    """All prompts once both ways, and how many replies were equal."""

    def __init__(self) -> None:
        self.vanilla, self.speculating = ContenderSums(), ContenderSums()
        self.prompts = self.equal = 0

    def add(self, vanilla: BatchRun, speculating: BatchRun) -> None:
        """Count a batch that ran both ways."""
        self.vanilla.add(vanilla)
        self.speculating.add(speculating)
        pairs = list(zip(vanilla.token_ids, speculating.token_ids, strict=True))
        self.prompts += len(pairs)
        self.equal += sum(one == other for one, other in pairs)


class SpecContest:
    """Two runtimes of one model that take turns; the second speculates."""

    def __init__(
        self,
        vanilla: LLMInferenceRuntime,
        speculating: LLMInferenceRuntime,
        prompts: Sequence[list[int]],
        max_tokens: int,
    ) -> None:
        self._vanilla = vanilla
        self._speculating = speculating
        self._prompts = prompts
        self._max_tokens = max_tokens

    def measure(self, batch: int, repeats: int, progress: Progress) -> SpecFigures:
        """Run all prompts `repeats` times in batches of `batch`.

        One time before is not counted: there a policy learns which way is faster.
        """
        groups = list(batches(self._prompts, batch))
        self._repeat(groups, lambda: None)
        before = msgspec.structs.replace(self._speculating.speculation_metrics)
        before.accepted_by_position = list(before.accepted_by_position)
        done = 0

        def tick() -> None:
            nonlocal done
            done += 1
            progress(done, repeats * len(groups))

        found = [self._repeat(groups, tick) for _ in range(repeats)]
        metrics = metrics_since(before, self._speculating.speculation_metrics)
        return spec_figures(batch, found, metrics)

    def _repeat(self, groups: Sequence[list[list[int]]], tick: Callable[[], None]) -> Repeat:
        repeat = Repeat()
        for number, group in enumerate(groups):
            # Who goes first changes, so that neither finds always warm or always cold caches.
            if number % 2:
                speculating = self._run(self._speculating, group)
                vanilla = self._run(self._vanilla, group)
            else:
                vanilla = self._run(self._vanilla, group)
                speculating = self._run(self._speculating, group)
            repeat.add(vanilla, speculating)
            tick()
        return repeat

    def _run(self, runtime: LLMInferenceRuntime, group: list[list[int]]) -> BatchRun:
        return run_batch(runtime, greedy_rows(group, self._max_tokens))


def spec_figures(
    batch: int, repeats: Sequence[Repeat], metrics: EagleGenerationMetrics
) -> SpecFigures:
    """The figures of one case, from its repeats and what rounds did in them."""
    vanilla = [repeat.vanilla for repeat in repeats]
    ours = [repeat.speculating for repeat in repeats]
    pairs = list(zip(ours, vanilla, strict=True))
    per_round = 1000 / metrics.steps if metrics.steps else None
    return SpecFigures(
        accept_length=metrics.accept_length if metrics.rounds else None,
        speedup=median(one.tokens_per_s / other.tokens_per_s for one, other in pairs),
        vanilla_tokens_per_s=median(one.tokens_per_s for one in vanilla),
        tokens_per_s=median(one.tokens_per_s for one in ours),
        speedup_with_prefill=median(
            one.whole_tokens_per_s / other.whole_tokens_per_s for one, other in pairs
        ),
        batch=batch,
        prompts=repeats[0].prompts,
        equal_replies=sum(one.equal for one in repeats) / sum(one.prompts for one in repeats),
        rounds=metrics.rounds,
        drafted=metrics.drafted,
        accept_rates=metrics.accept_rates,
        round_share=sum(one.rounds for one in ours) / sum(one.steps for one in ours),
        vanilla_step_ms=1000 * median(one.generation_s / one.steps for one in vanilla),
        draft_ms=per_round and per_round * metrics.draft_s,
        verify_ms=per_round and per_round * metrics.verify_s,
        commit_ms=per_round and per_round * metrics.commit_s,
    )
