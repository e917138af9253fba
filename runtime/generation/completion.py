from collections.abc import Sequence

from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import BatchRuntime
from hearth.runtime.request import (
    FinishReason,
    GeneratedRow,
    GenerationRequest,
    GenerationResponse,
    RowToken,
    TopLogprob,
)
from hearth.runtime.text.stream import TextStream
from hearth.runtime.text.tokenizer import Tokenizer


def complete(
    runtime: BatchRuntime, request: GenerationRequest, tokenizer: Tokenizer | None
) -> GenerationResponse:
    """Run rows to their end in an empty batch; text and stop strings need a tokenizer."""
    outcomes = [_RowOutcome(row.options.stop, tokenizer) for row in request.rows]
    seconds = {"prefill": 0.0, "decode": 0.0, "verify": 0.0}
    steps = 0
    numbers = runtime.admit(request.rows)
    of_row = dict(zip(numbers, outcomes, strict=True))
    try:
        while runtime.active:
            result = runtime.step()
            steps += 1
            seconds[result.kind] += result.ended - result.started
            for token in result.tokens:
                if of_row[token.row].take(token):
                    runtime.leave(token.row)
    finally:
        if runtime.active:
            for number in numbers:
                runtime.leave(number)
    return GenerationResponse(
        rows=[outcome.result() for outcome in outcomes],
        prefill_s=seconds["prefill"],
        decode_s=seconds["decode"] + seconds["verify"],
        steps=steps,
    )


class _RowOutcome:
    """Collects what one row reports; a stop string overrides how the row ended otherwise."""

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer | None) -> None:
        if stop and tokenizer is None:
            raise HearthError(
                "unsupported_option", "stop strings are matched on text: pass a tokenizer", "stop"
            )
        self._stream = None if tokenizer is None else TextStream(tokenizer, stop)
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[float] = []
        self._top: list[tuple[TopLogprob, ...]] = []
        self._finish: FinishReason | None = None
        self._error: str | None = None

    def take(self, token: RowToken) -> bool:
        """Add a report; whether a stop string ends the row with it.

        What the same step gave behind that string is dropped.
        """
        if self._stream is not None and self._stream.stopped:
            return False
        if token.error is not None:
            self._error = token.error
            return False
        self._token_ids.append(token.token_id)
        self._finish = token.finish
        if token.logprob is not None:
            self._logprobs.append(token.logprob)
            self._top.append(token.top)
        if self._stream is None:
            return False
        # A row stops by itself at an end token only, which is no text even where it has a spelling.
        if token.finish != "stop":
            self._text.append(self._stream.push(token.token_id))
        return self._stream.stopped

    def result(self) -> GeneratedRow:
        """The row as a whole."""
        stopped = False
        if self._stream is not None:
            if not self._stream.stopped:
                self._text.append(self._stream.finish())
            stopped = self._stream.stopped
        return GeneratedRow(
            token_ids=self._token_ids,
            text="".join(self._text),
            logprobs=self._logprobs,
            top_logprobs=self._top,
            finish_reason="stop" if stopped else self._finish,
            error=self._error,
        )
