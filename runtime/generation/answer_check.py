"""Check of an engine: force it through the tokens of a known answer and compare its logits."""

import time
from collections.abc import Sequence

import msgspec

from hearth.runtime.batch import BatchReorder, DecodingInferenceContext
from hearth.runtime.device.device import BatchSampler, PendingSamples
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.in_flight import InFlightStep
from hearth.runtime.generation.prefill_budget import Chunk
from hearth.runtime.generation.vanilla import VanillaStrategy
from hearth.runtime.known_answer import FORCING_BIAS, KnownAnswer
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.runner.engine_runner import LLMEngineRunner

SECONDS = 2.0
"""Seconds of the check, unless a prefill of all ids and a few decode steps take longer."""
LEAST_DECODES = 2
_ALTERNATIVES = 8
"""Number of likeliest tokens among which the right one is looked for."""


class AnswerReport(msgspec.Struct, kw_only=True):
    """Report of a check that passed: logits compared, steps and seconds.

    No lead was more than `error` off, of `tolerance` that are allowed.
    """

    compared: int = 0
    steps: int = 0
    error: float = 0.0
    tolerance: float
    seconds: float = 0.0

    @property
    def meaning(self) -> str:
        """The report as a sentence."""
        return (
            f"{self.compared} of the model's answers came out as they were computed at the export: "
            f"the likeliest token's lead is off by {self.error:.2g} at most, and rounding on this "
            f"device alone may make that {self.tolerance:.2g}"
        )


class AnswerCheck:
    """Check of one answer while no row is active: prefill all ids, and decode half of them.

    Decode steps run in a batch of one and in the largest, with prompts of different lengths. A
    bias forces each token; logits are compared as they are before the bias.
    """

    def __init__(self, answer: KnownAnswer, runner: LLMEngineRunner, sampler: BatchSampler) -> None:
        self._answer = answer
        self._runner = runner
        self._sampler = sampler
        self._config = runner.get_engine_config()
        self._strategy = VanillaStrategy(runner, sampler)
        self._report = AnswerReport(tolerance=answer.tolerance)

    def run(self) -> AnswerReport:
        """Run the check; raises `wrong_answer` at the first token whose lead is off."""
        began = time.monotonic()
        batch = self._config.max_supported_batch_size
        ids = min(len(self._answer.token_ids), self._config.max_supported_input_length)
        half = (ids + 1) // 2
        try:
            self._force([ids], 0)
            a_prefill = time.monotonic() - began
            self._force([half], ids - half, began + SECONDS / 2)
            if batch > 1:
                # Half of what is left goes to prompts, whose tokens all take the same time.
                seconds = max(0.0, began + SECONDS - time.monotonic()) / 2
                longest = max(1, min(half, int(ids * seconds / (batch * a_prefill))))
                prompts = [longest - row * longest // batch for row in range(batch)]
                self._force(sorted(prompts), ids - half, began + SECONDS)
        finally:
            self._runner.reset(0)
        self._report.seconds = time.monotonic() - began
        return self._report

    def _force(self, prompts: Sequence[int], decodes: int, until: float = 0.0) -> None:
        """Prefill so many ids of each row, the shortest first, and decode those behind them."""
        context = DecodingInferenceContext(self._config)
        context.admit(self._rows(prompts))
        context.arrange()
        self._runner.reset(len(prompts))
        self._sampler.reorder(BatchReorder.fresh(self._rows(prompts)))
        while rows := context.joiners:
            chunk = Chunk(len(rows), min(self._config.prefill_chunk, rows[-1].prompt_left))
            self._compare(self._strategy.prefill_step(context, chunk), prompts)
        for done in range(1, decodes + 1):
            if done > LEAST_DECODES and time.monotonic() > until:
                return
            filled = [prompt + done for prompt in prompts]
            self._sampler.reorder(BatchReorder.fresh(self._rows(filled)))
            self._compare(self._strategy.decode_step(context), filled)

    def _rows(self, filled: Sequence[int]) -> list[RowRequest]:
        """Build rows of the first `filled` ids, each forced to sample the one behind them."""
        ids = self._answer.token_ids
        alternatives = min(_ALTERNATIVES, self._config.output_vocab_size)
        rows = []
        for count in filled:
            options = RequestOptions(
                max_tokens=len(ids),
                logprobs=alternatives,
                logit_bias=tuple((token, FORCING_BIAS) for token in ids[count : count + 1]),
                ignore_eos=True,
            )
            known = list(ids[:count])
            rows.append(RowRequest(token_ids=known, prompt_length=count, options=options))
        return rows

    def _compare(self, step: InFlightStep[PendingSamples], filled: Sequence[int]) -> None:
        """Compare the logits of a step behind the first `filled` ids of each row."""
        self._report.steps += 1
        for token in self._strategy.collect(step):
            place = filled[token.row] - 1
            where = f"{step.kind}, batch {len(filled)}, position {place}"
            if token.error is not None:
                raise _wrong(f"{where}: no finite numbers")
            error = self._answer.error(place, token.top)
            self._report.compared += 1
            self._report.error = max(self._report.error, error)
            if error > self._answer.tolerance:
                best, lead = self._answer.best[place], self._answer.leads[place]
                got, other = token.top[:2]
                raise _wrong(
                    f"{where}: token {best} should lead by {lead:.4f}, token {got.token_id} leads "
                    f"by {got.logprob - other.logprob:.4f}"
                )


def _wrong(what: str) -> HearthError:
    return HearthError(
        "wrong_answer",
        f"the engine does not compute its model ({what}): export the model again, and if that "
        "does not help, for another dialect, backend or device",
        "engine",
    )
