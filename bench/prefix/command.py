"""The command `hearth bench prefix`."""

from contextlib import closing
from functools import partial
from pathlib import Path

import click

from bench.decode.cases import exported, random_source
from bench.one_row import (
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
from bench.prefix.figures import LEAST_SAVED, PrefixFigures
from bench.prefix.session import PrefixSession, room
from bench.report import Record, note, print_cases, publish, record_option
from daemon.cli.console import progress_bar
from daemon.cli.errors import FAILED
from daemon.cli.options import json_option
from runtime.cache_folder import cache_folder
from runtime.config import LLMEngineRunnerConfig, load_config
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.errors import HearthError
from runtime.export import ExportOptions, Progress
from runtime.memory.sizes import kv_cache_bytes
from runtime.options import RuntimeOptions

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
    cache: Path | None,
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
            kept = cache or cache_folder() / "bench"
            folder = _engine(kept, chosen, options, progress, quick=quick)
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
    return _judge(found)


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


def _judge(found: PrefixFigures) -> int:
    if found.within_aim:
        return 0
    if found.equal < 1:
        note("a reply with the cache differs from the one without")
    if found.saved_share < LEAST_SAVED:
        note(f"less than {LEAST_SAVED:.0%} of the time of what is shared is saved")
    return FAILED
