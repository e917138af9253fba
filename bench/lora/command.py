"""The command `hearth bench lora`."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

import click
from msgspec import structs

from bench.decode.cases import exported, random_source
from bench.lora.figures import LoraFigures
from bench.lora.session import LoraSession, room
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
from bench.report import Record, note, print_fields, publish, record_option
from daemon.cli.console import progress_bar
from daemon.cli.errors import FAILED
from daemon.cli.options import json_option
from daemon.shipped import SOURCE
from runtime.cache_folder import cache_folder
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.options import RuntimeOptions

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
    cache: Path | None,
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
    folder = cache or cache_folder() / "bench"
    with progress_bar() as progress:
        shipped = model == "tiny"
        source = SOURCE if shipped else random_source("0.6b", folder, progress, quick=quick)
        stem = f"{source.name}-lora-{chosen}"
        engines = [
            exported(source, folder, f"{stem}-{options.max_lora_rank}", options, progress)
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
    return _judge(found, shipped=shipped)


def _judge(found: LoraFigures, *, shipped: bool) -> int:
    missed = found.missed(shipped=shipped)
    for aim in missed:
        note(f"missed: {aim}")
    return FAILED if missed else 0
