"""The command `hearth bench lora`: steps with adapters and without, in this process."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import click
import msgspec
import numpy as np
from msgspec import structs

from hearth.bench.batches import BatchRun, rows_of, run_batch
from hearth.bench.decode.cases import exported, random_source
from hearth.bench.one_row import (
    Kind,
    builder_option,
    cache_option,
    choose_kind,
    device_option,
    export_options,
    kind_option,
    quick_option,
    threads_option,
)
from hearth.bench.report import Record, judged, print_fields, publish, record_option
from hearth.daemon.cli.console import progress_bar
from hearth.daemon.cli.options import json_option
from hearth.daemon.shipped import SOURCE
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.lora.adapter import Adapter, LowRank, projection_shapes
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions
from hearth.runtime.tensors.tensor import numpy_dtype

MOST_SWITCH_MS = 1.0
MOST_COST = 1.1
MOST_COST_NONE = 1.02
MOST_COST_SHIPPED = 1.5


class Turn(NamedTuple):
    """Seconds of a decode step, measured one after the other.

    `plain` is that of an engine without adapters, `none` of one that takes them and has none
    active, `adapted` of the same with one active.
    """

    plain: float
    none: float
    adapted: float


class Switches(NamedTuple):
    """`seconds` of each switch until the device is done with it, and decode steps without a graph.

    `first` are the seconds of the decode steps that came first behind the switches, `others` those
    of the steps behind them.
    """

    seconds: Sequence[float]
    first: Sequence[float]
    others: Sequence[float]
    misses: int


class LoraFigures(msgspec.Struct, kw_only=True):
    """An engine with adapters of up to a rank; `step_cost` is over a step without adapters.

    `first_step_cost` is a decode step that comes first behind a switch over those behind it, a
    median as all others. `switches` were made, between adapters and none.
    """

    switch_ms: float
    step_cost: float
    step_cost_none: float
    graph_misses_per_switch: float
    first_step_cost: float
    plain_ms: float
    none_ms: float
    adapted_ms: float
    rank: int
    switches: int
    dtype: str = ""

    def missed(self, *, shipped: bool) -> list[str]:
        """The aims that are missed; those of the shipped model are its own."""
        limits = (
            ("switch_ms", self.switch_ms, MOST_SWITCH_MS),
            ("step_cost", self.step_cost, MOST_COST_SHIPPED if shipped else MOST_COST),
            (
                "step_cost_none",
                self.step_cost_none,
                MOST_COST_SHIPPED if shipped else MOST_COST_NONE,
            ),
            ("graph_misses_per_switch", self.graph_misses_per_switch, 0.0),
        )
        return [f"{name} is {at:.4g}, at most {most:g}" for name, at, most in limits if at > most]


def lora_figures(turns: Sequence[Turn], switches: Switches, rank: int) -> LoraFigures:
    """The figures of some turns and switches."""
    return LoraFigures(
        switch_ms=1000 * median(switches.seconds),
        step_cost=median(one.adapted / one.plain for one in turns),
        step_cost_none=median(one.none / one.plain for one in turns),
        graph_misses_per_switch=switches.misses / len(switches.seconds),
        first_step_cost=median(switches.first) / median(switches.others),
        plain_ms=1000 * median(one.plain for one in turns),
        none_ms=1000 * median(one.none for one in turns),
        adapted_ms=1000 * median(one.adapted for one in turns),
        rank=rank,
        switches=len(switches.seconds),
    )


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


_CAPACITY = 512


@click.command()
@device_option
@click.option(
    "--model",
    type=click.Choice(["0.6b", "tiny"]),
    default="0.6b",
    show_default=True,
    help="The shape of Qwen3-0.6B, or the shipped model.",
)
@kind_option
@click.option("--rank", type=click.IntRange(1, 512), default=16, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option(
    "--tokens",
    type=click.IntRange(1, _CAPACITY // 2),
    default=24,
    show_default=True,
    help="Decode steps of each turn.",
)
@click.option("--switches", type=click.IntRange(1), default=60, show_default=True)
@threads_option
@cache_option
@builder_option
@quick_option
@record_option
@json_option
def lora(
    *,
    device: str,
    model: Literal["0.6b", "tiny"],
    kind: Kind | None,
    rank: int,
    rounds: int,
    tokens: int,
    switches: int,
    threads: int,
    cache: Path,
    builder_python: str | None,
    record: Record,
    quick: bool,
    as_json: bool,
) -> int:
    """Decode steps with an adapter, and with none, beside an engine that takes no adapters.

    One row, in this process; the three take turns. Then adapters are switched before each of many
    short replies. The exit code is 1 when a switch takes more than a millisecond or a decode step
    behind it finds no captured graph, or when a step costs more than 1.1 times that of an engine
    without adapters, or 1.02 times where none is active; of the shipped model 1.5 times.
    """
    if quick and model != "0.6b":
        raise click.UsageError("--quick is a model of its own")
    chosen = choose_kind(device, kind, threads, builder_python)
    plain = export_options(chosen, builder_python, _CAPACITY)
    with progress_bar() as progress:
        shipped = model == "tiny"
        source = SOURCE if shipped else random_source("0.6b", cache, progress, quick=quick)
        stem = f"{source.name}-lora-{chosen}"
        engines = [
            exported(source, cache, f"{stem}-{options.max_lora_rank}", options, progress)
            for options in (plain, structs.replace(plain, max_lora_rank=rank))
        ]
    asked = RuntimeOptions(threads=threads, max_batch=1, capacity=room(tokens), verify=False)
    with (
        closing(LLMInferenceRuntime.open(engines[0], asked)) as without,
        closing(LLMInferenceRuntime.open(engines[1], asked)) as adapted,
        progress_bar() as progress,
    ):
        session = LoraSession(without, adapted, rank)
        found = session.figures(rounds, tokens, switches, partial(progress, "steps"))
    publish(found, lambda: print_fields("Adapters", found), as_json=as_json)
    record.keep({f"lora/{device}/{model}/{chosen}": found})
    return judged(f"missed: {aim}" for aim in found.missed(shipped=shipped))
