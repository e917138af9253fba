"""Decode steps with adapters and without, on two runtimes in this process."""

import time
from collections.abc import Callable, Iterator
from itertools import cycle

import numpy as np
from msgspec import structs

from bench.batches import BatchRun, rows_of, run_batch
from bench.lora.figures import LoraFigures, Switches, Turn, lora_figures
from runtime.adapters.adapter import Adapter, LowRank, projection_shapes
from runtime.config import LLMEngineRunnerConfig
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.request import RequestOptions
from runtime.tensors.dtypes import numpy_dtype

NAMES = ("first", "second")
PROMPT_TOKENS = 32
_STEPS_BEHIND = 3
"""Decode steps behind a switch."""

Tick = Callable[[int, int], None]


def room(tokens: int) -> int:
    """Slots of a row that has so many decode steps, or those behind a switch."""
    return PROMPT_TOKENS + 1 + max(tokens, _STEPS_BEHIND + 1)


def random_adapter(config: LLMEngineRunnerConfig, rank: int, seed: int) -> Adapter:
    """An adapter of every projection, of small numbers."""
    random, dtype = np.random.default_rng(seed), numpy_dtype(config.dtype)

    def matrix(rows: int, columns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        numbers = random.standard_normal((rows, columns), dtype=np.float32)
        return np.asarray(numbers * np.float32(0.05 / rows**0.5), dtype=dtype)

    parts = {
        place: LowRank(matrix(inputs, rank), matrix(rank, outputs))
        for place, (inputs, outputs) in projection_shapes(config).items()
    }
    return Adapter(rank, "", f"random {seed}", parts)


class LoraSession:
    """Measures `adapted`, whose engine takes adapters, beside `plain`, whose engine takes none."""

    def __init__(self, plain: LLMInferenceRuntime, adapted: LLMInferenceRuntime, rank: int) -> None:
        self._plain, self._adapted, self._rank = plain, adapted, rank
        for seed, name in enumerate(NAMES):
            adapted.load_adapter(name, random_adapter(adapted.config, rank, seed))
        random = np.random.default_rng(1)
        self._prompt = random.integers(3, adapted.config.vocab_size, PROMPT_TOKENS).tolist()
        for runtime in (plain, adapted):
            runtime.capture([1])

    def figures(self, rounds: int, tokens: int, switches: int, tick: Tick) -> LoraFigures:
        """The figures of rounds of so many decode steps a turn, and of so many switches."""
        steps = rounds + switches
        turns = []
        for done in range(rounds):
            # Whoever comes first in a round finds other things in the caches.
            order = [*Turn._fields[done % 3 :], *Turn._fields[: done % 3]]
            turns.append(Turn(**{one: self._step_s(one, tokens) for one in order}))
            tick(done + 1, steps)
        made = self._switches(switches, lambda done: tick(rounds + done, steps))
        found = lora_figures(turns, made, self._rank)
        return structs.replace(found, dtype=self._plain.config.dtype)

    def _step_s(self, which: str, tokens: int) -> float:
        runtime = self._plain if which == "plain" else self._adapted
        ran = self._run(runtime, NAMES[0] if which == "adapted" else "", tokens)
        return ran.generation_s / ran.generated

    def _switches(self, count: int, tick: Callable[[int], None]) -> Switches:
        runtime, seconds = self._adapted, list[float]()
        stream = runtime._device.stream  # noqa: SLF001 - nobody else waits for a switch
        first, others = list[float](), list[float]()
        names: Iterator[str] = cycle((*NAMES, ""))
        misses = 0
        for done in range(count):
            name = next(names)
            # A GPU may still do what nobody waited for.
            stream.synchronize()
            began = time.perf_counter()
            runtime.switch_adapter(name)
            stream.synchronize()
            seconds.append(time.perf_counter() - began)
            before = self._misses()
            ran = self._run(runtime, name, _STEPS_BEHIND + 1)
            misses += self._misses() - before
            decode = [step.seconds for step in ran.steps if step.kind == "decode"]
            first.append(decode[0])
            others += decode[1:]
            tick(done + 1)
        return Switches(seconds, first, others, misses)

    def _misses(self) -> int:
        """Decode steps without a graph; chunks of prompts are counted apart."""
        runtime = self._adapted
        return runtime.counters.misses + runtime.counters.fallbacks - runtime.prompt_graphs.misses

    def _run(self, runtime: LLMInferenceRuntime, adapter: str, tokens: int) -> BatchRun:
        options = RequestOptions(max_tokens=tokens + 1, ignore_eos=True, adapter=adapter)
        return run_batch(runtime, rows_of([self._prompt], options))
