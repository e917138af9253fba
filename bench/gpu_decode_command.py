"""The part of `hearth bench decode` that is for a GPU."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from bench.gpu_cases import (
    ENGINES,
    GPU_CASES,
    GPUCase,
    GPUEngine,
    GPUModel,
    HalfType,
    engine_folder,
    export_options,
    random_source,
)
from bench.gpu_decode import GPUArtifacts, GPUPlan, measure_gpu
from bench.gpu_figures import GPUFigures, compare_batches, share_best_read
from bench.report import figure, note, print_table
from daemon.cli.console import progress_bar
from runtime.errors import HearthError

_COLUMNS = (
    "engine and case",
    "ms/step",
    "host us",
    "tok/s",
    "of bandwidth",
    "raw ms",
    "actor/raw",
    "transformers ms",
    "ratio",
    "compiled ms",
    "ratio",
)
_MODELS: tuple[GPUModel, ...] = ("0.6b", "4b")


class GPUChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller chose; `ready` names engine folders that exist, by `engine/model`."""

    cases: list[GPUCase]
    engines: tuple[GPUEngine, ...] = ENGINES
    dtype: HalfType = "float16"
    builder_python: str = sys.executable
    ready: dict[str, Path] = {}
    plan: GPUPlan = GPUPlan()
    quick: bool = False


def gpu_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that a GPU adds to `bench decode`; all are None or empty when not given."""
    for option in (
        click.option(
            "--ready",
            multiple=True,
            metavar="ENGINE/MODEL=DIR",
            help="Use this engine folder in place of an export; may be given more than once.",
        ),
        click.option(
            "--builder-python",
            metavar="FILE",
            help="The interpreter that has TensorRT's builder.  [this one]",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["float16", "bfloat16"]),
            help="Type of weights and cache, for the peers too.  [float16]",
        ),
        click.option(
            "--engine",
            "engines",
            multiple=True,
            type=click.Choice(list(ENGINES)),
            help="Measure this engine only; may be given more than once.  [all]",
        ),
    ):
        command = option(command)
    return command


def gpu_choice(cases: list[GPUCase], given: Mapping[str, Any], *, quick: bool) -> GPUChoice:
    """The choice that the values of `gpu_options` mean; raises click.BadParameter."""
    ready: dict[str, Path] = {}
    known = [f"{engine}/{model}" for engine in ENGINES for model in _MODELS]
    for text in given["ready"]:
        key, _, folder = text.partition("=")
        if key not in known or not folder:
            raise click.BadParameter(f"{text} is not ENGINE/MODEL=DIR", param_hint="--ready")
        ready[key] = Path(folder)
    return GPUChoice(
        cases=cases or list(GPU_CASES.values()),
        engines=given["engines"] or ENGINES,
        dtype=given["dtype"] or "float16",
        builder_python=given["builder_python"] or sys.executable,
        ready=ready,
        plan=GPUPlan(
            dtype=given["dtype"] or "float16",
            rounds=2 if quick else 7,
            steps=5 if quick else 40,
            host_steps=5 if quick else 17,
        ),
        quick=quick,
    )


def run_gpu(
    choice: GPUChoice, cache: Path, keep: Callable[[Mapping[str, GPUFigures]], None]
) -> dict[str, GPUFigures]:
    """Figures by `engine/model/bN`; what cannot run is told and has none.

    `keep` hears the figures so far after every case.
    """
    logs = cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    figures: dict[str, GPUFigures] = {}
    for model in dict.fromkeys(case.model for case in choice.cases):
        artifacts = _prepare(model, choice, cache)
        if not artifacts.engines:
            continue
        for case in (case for case in choice.cases if case.model == model):
            found = measure_gpu(case, artifacts, choice.plan, logs, note)
            figures.update({f"{engine}/{case.name}": one for engine, one in found.items()})
            compare_batches(figures)
            share_best_read(figures)
            keep(figures)
    return figures


def print_gpu(figures: Mapping[str, GPUFigures]) -> None:
    """Print the table and the notes."""
    print_table("Decode on the GPU; above 1 means that Hearth is ahead", _COLUMNS, _rows(figures))
    for name, found in figures.items():
        if found.tokens_vs_batch_1 is not None:
            note(f"{name}: {found.tokens_vs_batch_1:.2f} times the tokens of batch 1")


def _rows(figures: Mapping[str, GPUFigures]) -> Sequence[Sequence[str]]:
    return [
        (
            name,
            figure(found.step_ms, ".3f"),
            figure(found.host_us, ".0f"),
            figure(found.tokens_per_s, ".0f"),
            figure(found.bandwidth_share),
            figure(found.raw_ms, ".3f"),
            figure(found.actor_over_raw, ".3f"),
            figure(found.transformers_ms),
            figure(found.vs_transformers),
            figure(found.torch_compile_ms),
            figure(found.vs_torch_compile),
        )
        for name, found in figures.items()
    ]


def _prepare(model: GPUModel, choice: GPUChoice, cache: Path) -> GPUArtifacts:
    engines: dict[str, Path] = {}
    with progress_bar() as progress:
        source = random_source(model, cache, progress, quick=choice.quick)
        for engine in choice.engines:
            ready = choice.ready.get(f"{engine}/{model}")
            options = export_options(engine, choice.dtype, choice.builder_python)
            try:
                folder = ready or engine_folder(source, cache, options, progress)
            except HearthError as error:
                note(f"{engine}/{model} is left out: {error}")
            else:
                engines[engine] = folder
    return GPUArtifacts(source=source, engines=engines)
