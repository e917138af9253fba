"""`python -m tools.widths`: steps of token trees and of prompts on a GPU, beside a decode step.

Raw launches of captured steps of one row by Hearth's own kernels, and by ONNX Runtime.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

import click
import msgspec
import numpy as np
from msgspec import structs

from hearth.bench.decode.cases import (
    GPU_MODELS,
    DType,
    GPUEngine,
    GPUModel,
    export_options,
    gpu_engine,
)
from hearth.bench.report import Record, note, print_cases, publish, record_option
from hearth.daemon.cli.console import progress_bar
from hearth.daemon.cli.errors import FAILED, run_and_exit
from hearth.daemon.cli.options import json_option
from hearth.daemon.gpu_facts import gpu_facts
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.open import open_device
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.files import cache_folder
from hearth.runtime.generation.assembly import assemble
from hearth.runtime.generation.deployment import DeploymentConfig, load_engines
from hearth.runtime.loading import no_progress
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.runner.engine_runner import LLMEngineRunner

_FIELDS = "tokens ms over_step tokens_per_s vs_ort_cuda ort_cuda_ms step_ms dtype"
_ENGINES: tuple[GPUEngine, ...] = ("kernels", "ort-cuda")

CONTEXT = 128
_TOKEN = 7
_WARM_UP = 3


class WidthTimes(msgspec.Struct, kw_only=True):
    """Milliseconds of a launch: a decode step, trees by their nodes, a prompt of `prompt` tokens.

    All of one row; steps and trees follow `context` tokens, the prompt follows none.
    """

    step_ms: float
    tree_ms: dict[int, float]
    prompt_ms: float
    prompt: int
    context: int = CONTEXT


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts to time: `launches` back to back, `windows` times."""

    trees: tuple[int, ...] = (8, 60)
    prompt: int = 512
    windows: int = 9
    launches: int = 50


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


def width_times(folder: Path, amounts: Amounts) -> WidthTimes:
    """Open an engine folder and time it; raises the errors of opening.

    An engine of kernels verifies trees, as it does with a draft; others, which were exported for
    none, verify chains, as lookup has them do.
    """
    found = load_engines(folder, RuntimeOptions(max_batch=1, verify=False), no_progress)
    deployment = found.resolve(RuntimeOptions(max_batch=1, verify=False))
    config = _with_trees(deployment.base, amounts)
    device = open_device(config.device)
    given = DeploymentConfig(config, "off", deployment.speculation)
    runner = assemble(given, folder, EngineOptions(), device).runner
    with closing(runner):
        return _Steps(runner, amounts).times()


def _with_trees(config: LLMEngineRunnerConfig, amounts: Amounts) -> LLMEngineRunnerConfig:
    wide = structs.replace(
        config, prefill_chunk=amounts.prompt, max_verify_tree_size=max(amounts.trees)
    )
    if config.backend != "kernels":
        return wide
    layers = config.num_decoder_layers
    taps = tuple(sorted({1, layers // 2, layers - 1}))
    return structs.replace(
        wide,
        enable_eagle_spec_decode=True,
        eagle_layers=taps,
        output_hidden_dim=len(taps) * config.hidden_size,
    )


class _Steps:
    """One row's steps, each captured where its engine can be, launched again and again."""

    def __init__(self, runner: LLMEngineRunner, amounts: Amounts) -> None:
        self._runner, self._amounts = runner, amounts
        self._bindings = runner._steps  # noqa: SLF001 - nobody else has a use for these
        self._trees = runner._trees  # noqa: SLF001 - likewise
        self._device = runner._device  # noqa: SLF001 - likewise

    def times(self) -> WidthTimes:
        prompt_ms = self._prompt()
        return WidthTimes(
            prompt_ms=prompt_ms,
            prompt=self._amounts.prompt,
            step_ms=self._decode(),
            tree_ms={nodes: self._tree(nodes) for nodes in self._amounts.trees},
        )

    def _prompt(self) -> float:
        self._runner.reset(1)
        ids = np.full((1, self._amounts.prompt), _TOKEN, np.int64)
        self._runner._prepare_prefill(ids, [ids.size], 0)  # noqa: SLF001 - likewise
        self._runner.executor.capture_graph(self._bindings.stream)
        return self._launches()

    def _decode(self) -> float:
        self._fill()
        self._runner.execute_vanilla_decoding_step(1)
        # What a runner captures of steps may have more in it than the step.
        self._runner.executor.capture_graph(self._bindings.stream)
        return self._launches()

    def _tree(self, nodes: int) -> float:
        self._fill()
        ids = np.full((1, nodes), _TOKEN, np.int32)
        before = np.array([parents(nodes)], np.int32)
        self._device.tree_ops.upload_tree(self._trees, ids, before)
        self._runner.execute_eagle_base_tree_decoding_step(1, nodes)
        self._runner.executor.capture_graph(self._bindings.stream)
        return self._launches()

    def _fill(self) -> None:
        self._runner.reset(1)
        self._runner.execute_prefill_step(np.full((1, CONTEXT), _TOKEN, np.int64), [CONTEXT])

    def _launches(self) -> float:
        stream, execute = self._bindings.stream, self._runner.executor.execute
        count, windows = self._amounts.launches, list[float]()
        for number in range(-_WARM_UP, self._amounts.windows):
            stream.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                execute(stream)
            stream.synchronize()
            if number >= 0:
                windows.append(time.perf_counter() - began)
        return 1000 * median(windows) / count


def parents(nodes: int) -> Sequence[int]:
    """A tree in which each node has four children; the parent of the root is -1."""
    return [-1, *((node - 1) // 4 for node in range(1, nodes))]


if __name__ == "__main__":
    run_and_exit(lambda: widths.main(prog_name="python -m tools.widths", standalone_mode=False))
