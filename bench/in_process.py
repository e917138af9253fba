"""The loop without a daemon: what `bench overhead` compares with."""

from pathlib import Path
from time import monotonic

from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.options import RuntimeOptions
from runtime.request import RequestOptions, RowRequest
from runtime.text import Tokenizer


class InProcessLoop:
    """Tokenizer and runtime in this process, with a simulated engine of `step_ms` a step."""

    def __init__(self, engine: Path, step_ms: float) -> None:
        options = RuntimeOptions(engine_kind="simulated", step_ms=step_ms)
        self._runtime = LLMInferenceRuntime.open(engine, options)
        self._tokenizer = Tokenizer.open(engine)

    def first_token_s(self, prompt: str) -> float:
        """Seconds from the text to the end of prefill, tokenization included."""
        started = monotonic()
        self._begin([prompt], max_tokens=2)
        ended = self._runtime.step().ended
        self._runtime.release()
        return ended - started

    def tokens_per_s(self, prompts: list[str], max_tokens: int) -> float:
        """Throughput of one batch from its texts to its last token."""
        started = monotonic()
        self._begin(prompts, max_tokens)
        tokens = 0
        while self._runtime.active:
            tokens += len(self._runtime.step().tokens)
        ended = monotonic()
        self._runtime.release()
        return tokens / (ended - started)

    def close(self) -> None:
        """Free the runtime."""
        self._runtime.close()

    def _begin(self, prompts: list[str], max_tokens: int) -> None:
        self._runtime.admit([self._row(prompt, max_tokens) for prompt in prompts])

    def _row(self, prompt: str, max_tokens: int) -> RowRequest:
        token_ids = self._tokenizer.encode(prompt)
        return RowRequest(
            token_ids=token_ids,
            prompt_length=len(token_ids),
            options=RequestOptions(max_tokens=max_tokens, ignore_eos=True),
        )
