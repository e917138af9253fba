"""Prompts that begin alike, on a runtime in this process."""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs

from bench.batches import BatchRun, rows_of, run_batch
from bench.prefix.figures import PrefixFigures, Round, SharedFigures, prefix_figures, shared_figures
from bench.spec.verify import NEAR_TIE
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.device.cpu.cpu_device import cpu_instructions
from runtime.errors import HearthError
from runtime.prefix.metrics import PrefixMetrics
from runtime.prefix.prefix_cache import is_exact
from runtime.request import CacheUse, RequestOptions

OWN_TOKENS = 32
"""Tokens of each prompt behind the shared ones."""
REPLY_TOKENS = 16
_PAGE = 32
_LONG, _MORE = 1024, 4
_ALTERNATIVES = 8

Tick = Callable[[int, int], None]


def room(shared: int) -> int:
    """Tokens of capacity that so many shared ones take."""
    return shared + OWN_TOKENS + REPLY_TOKENS


class PrefixSession:
    """Measures a runtime that has a prefix cache, one row at a time.

    `seed` chooses the tokens. Raises `internal` where nothing of a prompt was kept.
    """

    def __init__(self, runtime: LLMInferenceRuntime, seed: int = 1) -> None:
        self._runtime = runtime
        self._random = np.random.default_rng(seed)
        config = runtime.config
        self._words = [
            token for token in range(config.vocab_size) if token not in config.eos_token_ids
        ]
        self._exact = is_exact(config, cpu_instructions())

    def figures(self, shared: Sequence[int], rounds: int, tick: Tick) -> PrefixFigures:
        """The figures of these numbers of shared tokens."""
        bytes_per_token = self._bytes_per_token()
        found: dict[int, SharedFigures] = {}
        near_tie = None if self._exact else NEAR_TIE[self._runtime.config.dtype]
        # What takes little time is measured more often.
        repeats = {tokens: rounds * max(1, min(_MORE, _LONG // tokens)) for tokens in shared}
        done = 0
        for tokens, count in repeats.items():
            taken: list[Round] = []
            for _ in range(count):
                taken.append(self._round(tokens))
                tick(done := done + 1, sum(repeats.values()))
            found[tokens] = shared_figures(taken, near_tie)
        figures = prefix_figures(found, bytes_per_token, exact=self._exact)
        return structs.replace(figures, dtype=self._runtime.config.dtype)

    def _bytes_per_token(self) -> float:
        """By a prompt of whole pages, the first that an empty cache sees."""
        tokens = 8 * _PAGE
        self._run(self._tokens(tokens), "use", reply=1)
        # Whoever looks up next sees what has been saved.
        self._run(self._tokens(_PAGE), "bypass", reply=1)
        held = sum(self._metrics.bytes.values())
        if not held:
            raise HearthError("internal", "the prefix cache has kept nothing of a prompt")
        return held / tokens

    def _round(self, shared: int) -> Round:
        """The same work with and without, one after the other."""
        beginning, own = self._tokens(shared), self._tokens(OWN_TOKENS)
        fill = self._run([*beginning, *self._tokens(OWN_TOKENS)], "use", reply=1)
        before = self._metrics.reused
        given = self._run([*beginning, *own], "use")
        reused = self._metrics.reused - before
        without = self._run([*beginning, *own], "bypass")
        alone = self._run(own, "bypass")
        return Round(
            fill_s=fill.prefill_s,
            with_s=given.prefill_s,
            without_s=without.prefill_s,
            own_s=alone.prefill_s,
            reused=reused,
            reply=given.rows[0],
            reference=without.rows[0],
        )

    @property
    def _metrics(self) -> PrefixMetrics:
        if (metrics := self._runtime.prefix_metrics) is None:
            raise HearthError("internal", "the runtime has no prefix cache")
        return metrics

    def _run(self, prompt: list[int], cache: CacheUse, reply: int = REPLY_TOKENS) -> BatchRun:
        options = RequestOptions(
            max_tokens=reply, ignore_eos=True, logprobs=_ALTERNATIVES, cache=cache
        )
        return run_batch(self._runtime, rows_of([prompt], options))

    def _tokens(self, count: int) -> list[int]:
        places = self._random.integers(0, len(self._words), count)
        return [self._words[place] for place in places]
