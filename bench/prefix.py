"""The command `hearth bench prefix`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

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
from hearth.bench.report import Record, judged, note, print_cases, publish, record_option
from hearth.bench.spec.contest import NEAR_TIE, divergence
from hearth.daemon.cli.console import progress_bar
from hearth.daemon.cli.options import json_option
from hearth.runtime.config import LLMEngineRunnerConfig, load_config
from hearth.runtime.device.cpu.cpu_device import cpu_instructions
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, Progress
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics, is_exact
from hearth.runtime.memory.sizes import kv_cache_bytes
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import CacheUse, RequestOptions, RowToken

_INSTANT = 1e-9
LEAST_SAVED = 0.9
"""Least share that has to be saved of the time that the shared tokens take."""


class Round(NamedTuple):
    """Seconds until the first tokens of four prompts, and two replies.

    One is new to the cache and fills it, one begins alike, then comes the same without the cache,
    and what it has of its own alone. `reused` tokens of the second came from the cache; `reply` and
    `reference` are those of the second and the third.
    """

    fill_s: float
    with_s: float
    without_s: float
    own_s: float
    reused: int
    reply: Sequence[RowToken]
    reference: Sequence[RowToken]


class SharedFigures(msgspec.Struct, kw_only=True):
    """Figures of one number of shared tokens; medians of all rounds.

    `saved_share` is of the time that the shared tokens take, `ttft_ratio` the time to the first
    token over that without a cache, `fill_cost` the same of a prompt that was new. `equal` is the
    share of replies that are the same: bit for bit where `exact`, else but for near-ties.
    `largest_difference` is that of two log probabilities of one token behind equal ones.
    """

    without_ms: float
    with_ms: float
    own_ms: float
    saved_share: float
    ttft_ratio: float
    fill_cost: float
    reused: int
    equal: float
    largest_difference: float


class PrefixFigures(msgspec.Struct, kw_only=True):
    """An engine with a prefix cache; `saved_share` is the lowest of all numbers of shared tokens.

    `bytes_per_token` are those that a token of the cache takes.
    """

    saved_share: float
    ttft_ratio_1024: float | None
    bytes_per_token: float
    equal: float
    exact: bool
    shared: dict[str, SharedFigures]
    dtype: str = ""

    def missed(self) -> Iterator[str]:
        """The aims that are missed: no reply differs, nine tenths of what is shared are saved."""
        if self.equal < 1:
            yield "a reply with the cache differs from the one without"
        if self.saved_share < LEAST_SAVED:
            yield f"less than {LEAST_SAVED:.0%} of the time of what is shared is saved"


def shared_figures(rounds: Sequence[Round], near_tie: float | None) -> SharedFigures:
    """The figures of some rounds; without a `near_tie` replies are to be equal bit for bit."""
    without, given, own, fill = (
        median(times)
        for times in zip(
            *((one.without_s, one.with_s, one.own_s, one.fill_s) for one in rounds), strict=True
        )
    )
    return SharedFigures(
        without_ms=1000 * without,
        with_ms=1000 * given,
        own_ms=1000 * own,
        saved_share=1 - (given - own) / max(without - own, _INSTANT),
        ttft_ratio=given / without,
        fill_cost=fill / without,
        reused=min(one.reused for one in rounds),
        equal=sum(_equal(one, near_tie) for one in rounds) / len(rounds),
        largest_difference=max(_difference(one) for one in rounds),
    )


def prefix_figures(
    shared: Mapping[int, SharedFigures], bytes_per_token: float, *, exact: bool
) -> PrefixFigures:
    """The figures of all numbers of shared tokens."""
    long = shared.get(1024)
    return PrefixFigures(
        saved_share=min(one.saved_share for one in shared.values()),
        ttft_ratio_1024=None if long is None else long.ttft_ratio,
        bytes_per_token=bytes_per_token,
        equal=min(one.equal for one in shared.values()),
        exact=exact,
        shared={str(tokens): one for tokens, one in shared.items()},
    )


def _equal(one: Round, near_tie: float | None) -> bool:
    parted = divergence(0, one.reply, one.reference)
    if near_tie is not None:
        return parted is None or parted.gap < near_tie
    return parted is None and _difference(one) == 0.0


def _difference(one: Round) -> float:
    """Up to the first token that differs, and without it: nothing behind it can be compared."""
    largest = 0.0
    for ours, other in zip(one.reply, one.reference, strict=False):
        if ours.token_id != other.token_id:
            break
        largest = max(largest, abs((ours.logprob or 0.0) - (other.logprob or 0.0)))
    return largest


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
        """Bytes per token in the cache, by a prompt of whole pages, the first of an empty cache."""
        tokens = 8 * _PAGE
        self._run(self._tokens(tokens), "use", reply=1)
        # The next look-up sees what has been saved.
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


SHARED = (64, 256, 1024, 4096)
QUICK = (64, 256)
_CAPACITY = 4608
_ROUNDS = 3
_FIELDS = (
    "without_ms with_ms own_ms saved_share ttft_ratio fill_cost reused equal largest_difference"
)


@click.command()
@device_option
@kind_option
@click.option(
    "--engine",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="An engine folder in place of the shape of Qwen3-0.6B.",
)
@click.option(
    "--shared",
    multiple=True,
    type=click.IntRange(32),
    help=f"Shared tokens; may be given more than once.  [{' '.join(map(str, SHARED))}]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=_ROUNDS,
    show_default=True,
    help="Four times as many below 1,024 tokens.",
)
@threads_option
@cache_option
@builder_option
@quick_option
@record_option
@json_option
def prefix(
    *,
    device: str,
    kind: Kind | None,
    engine: Path | None,
    shared: tuple[int, ...],
    rounds: int,
    threads: int,
    cache: Path,
    builder_python: str | None,
    record: Record,
    quick: bool,
    as_json: bool,
) -> int:
    """Time to the first token of prompts that begin alike, with the prefix cache and without.

    One row at a time in this process; the same prompt with the cache, without it, and what it has
    of its own alone take turns. Replies with the cache are compared with those without. The exit
    code is 1 when one differs, but for near-ties where it may, or less than nine tenths of the time
    of what is shared is saved.
    """
    if engine is not None and (kind or quick):
        raise click.UsageError("--kind and --quick are for the model that this bench makes")
    chosen = choose_kind(device, kind, threads, builder_python)
    folder = engine
    if folder is None:
        options = export_options(chosen, builder_python, _CAPACITY)
        with progress_bar() as progress:
            folder = _engine(cache, chosen, options, progress, quick=quick)
    config = load_config(folder)
    if config.device != device:
        text = f"this engine is for {config.device}, not {device}"
        raise HearthError("engine_incompatible", text, "device")
    lengths = _fitting(shared or (QUICK if quick else SHARED), config)
    options_here = runtime_options(config, max(lengths), threads)
    with closing(LLMInferenceRuntime.open(folder, options_here)) as runtime:
        runtime.capture([1])
        with progress_bar() as progress:
            session = PrefixSession(runtime)
            found = session.figures(lengths, rounds, partial(progress, "prompts"))
    publish(found, lambda: _print(found), as_json=as_json)
    record.keep({f"prefix/{device}/{chosen if engine is None else engine.name}": found})
    return judged(found.missed())


def _engine(
    cache: Path, kind: Kind, options: ExportOptions, progress: Progress, *, quick: bool
) -> Path:
    source = random_source("0.6b", cache, progress, quick=quick)
    return exported(source, cache, f"{source.name}-prefix-{kind}", options, progress)


def _fitting(shared: tuple[int, ...], config: LLMEngineRunnerConfig) -> list[int]:
    capacity = config.max_kv_cache_capacity
    fitting = [tokens for tokens in shared if room(tokens) <= capacity]
    if len(fitting) < len(shared):
        note(f"a row of this engine holds {capacity} tokens: what is longer is left out")
    if not fitting:
        raise HearthError("capacity_exceeded", "no number of shared tokens fits", "shared")
    return fitting


def runtime_options(
    config: LLMEngineRunnerConfig, longest: int, threads: int = 0
) -> RuntimeOptions:
    """One row, and a cache that holds the longest prompt twice."""
    tokens = room(longest)
    return RuntimeOptions(
        threads=threads,
        max_batch=1,
        capacity=config.max_kv_cache_capacity,
        prefix_cache_bytes=2 * kv_cache_bytes(config, 1, tokens),
    )


def _print(found: PrefixFigures) -> None:
    title = "Time to the first token of prompts that begin alike, by shared tokens"
    print_cases(title, _FIELDS, found.shared)
    note(f"a token takes {found.bytes_per_token:.0f} bytes in the cache")
    how = "bit for bit" if found.exact else "but for near-ties"
    note(f"{found.equal:.0%} of the replies are those without the cache, {how}")
