"""The command `hearth bench widths`."""

import sys
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from bench.decode.cases import (
    GPU_MODELS,
    DType,
    GPUEngine,
    GPUModel,
    export_options,
    gpu_engine,
)
from bench.report import Record, note, print_cases, publish, record_option
from bench.widths.session import Amounts, WidthTimes, width_times
from daemon.cli.console import progress_bar
from daemon.cli.errors import FAILED
from daemon.cli.options import json_option
from daemon.gpu_facts import gpu_facts
from runtime.cache_folder import cache_folder
from runtime.errors import HearthError

_FIELDS = "tokens ms over_step tokens_per_s vs_ort_cuda ort_cuda_ms step_ms dtype"
_ENGINES: tuple[GPUEngine, ...] = ("kernels", "ort-cuda")


class WidthFigures(msgspec.Struct, kw_only=True):
    """A step of one row of several tokens: `ms` of a raw launch; `step_ms` that of a decode step.

    `over_step` is their ratio. `vs_ort_cuda` is above 1 where the kernels are ahead.
    """

    tokens: int
    context: int
    ms: float
    over_step: float
    tokens_per_s: float
    step_ms: float
    vs_ort_cuda: float | None = None
    ort_cuda_ms: float | None = None
    dtype: str = "float16"


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(list(GPU_MODELS)),
    help="Measure this model only; may be given more than once.  [all]",
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    type=click.Choice(list(_ENGINES)),
    help="Measure this engine only; may be given more than once.  [both]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16"]),
    default="float16",
    show_default=True,
    help="Type of weights and cache.",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where models are kept between runs.  [$HEARTH_CACHE/bench]",
)
@record_option
@json_option
def widths(
    *,
    models: tuple[GPUModel, ...],
    engines: tuple[GPUEngine, ...],
    dtype: DType,
    cache: Path | None,
    record: Record,
    as_json: bool,
) -> int:
    """Steps of token trees and of prompts on a GPU, beside a decode step.

    Raw launches of captured steps of one row by Hearth's own kernels, and by ONNX Runtime.
    """
    gpu_facts()
    figures: dict[str, WidthFigures] = {}
    for model in models or GPU_MODELS:
        times = _measure(model, engines or _ENGINES, dtype, cache or cache_folder() / "bench")
        figures |= width_figures(model, times, dtype)
        record.keep(figures)
    title = "Steps of several tokens of one row"
    publish(figures, lambda: print_cases(title, _FIELDS, figures), as_json=as_json)
    return 0 if figures else FAILED


def _measure(
    model: GPUModel, engines: tuple[GPUEngine, ...], dtype: DType, cache: Path
) -> dict[GPUEngine, WidthTimes]:
    times: dict[GPUEngine, WidthTimes] = {}
    with progress_bar() as progress:
        for engine in engines:
            options = export_options(engine, dtype, sys.executable)
            try:
                folder = gpu_engine(engine, model, options, cache, progress)
                times[engine] = width_times(folder, Amounts())
            except HearthError as error:
                note(f"{engine}/{model} is left out: {error}")
    return times


def width_figures(
    model: GPUModel, times: Mapping[GPUEngine, WidthTimes], dtype: DType
) -> dict[str, WidthFigures]:
    """Figures by key, those of 0.6B without its name; none without the kernels' times."""
    ours, other = times.get("kernels"), times.get("ort-cuda")
    if ours is None:
        return {}
    behind = "" if model == GPU_MODELS[0] else f"/{model}"

    def figures(tokens: int, context: int, ms: float, peer_ms: float | None) -> WidthFigures:
        return WidthFigures(
            tokens=tokens,
            context=context,
            ms=ms,
            over_step=ms / ours.step_ms,
            tokens_per_s=1000 * tokens / ms,
            step_ms=ours.step_ms,
            vs_ort_cuda=peer_ms / ms if peer_ms else None,
            ort_cuda_ms=peer_ms,
            dtype=dtype,
        )

    found = {
        f"verify/{nodes}{behind}": figures(nodes, ours.context, ms, None)
        for nodes, ms in ours.tree_ms.items()
    }
    peer_ms = None if other is None else other.prompt_ms
    prompt = figures(ours.prompt, 0, ours.prompt_ms, peer_ms)
    return {**found, f"prefill/{ours.prompt}{behind}": prompt}
