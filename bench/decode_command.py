from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from bench.cases import CASES, Case, prepare
from bench.decode import DecodeOptions, make_plan, measure
from bench.figures import SHARE_LIMIT, DecodeFigures
from bench.gpu_cases import GPU_CASES
from bench.gpu_decode_command import GPUChoice, gpu_choice, gpu_options, print_gpu, run_gpu
from bench.record import keep_figures, record_option
from bench.report import figure, note, print_table, publish
from daemon.cli.console import progress_bar
from daemon.cli.errors import FAILED
from daemon.cli.options import json_option
from daemon.shipped import SOURCE, cache_folder
from runtime.executor.threads import physical_cores

_COLUMNS = (
    "case",
    "tok/s",
    "ms/step",
    "of floor",
    "GB/s",
    "of plain read",
    "transformers ms",
    "ratio",
    "llama.cpp ms",
    "ratio",
)


@click.command()
@click.option(
    "--case",
    "names",
    multiple=True,
    type=click.Choice([*CASES, *GPU_CASES]),
    help="Measure this case only; may be given more than once.  [all]",
)
@click.option(
    "--threads",
    type=click.IntRange(0, 1024),
    default=0,
    metavar="N",
    help="Threads of every contender; 0 for all physical cores.  [0]",
)
@click.option(
    "--spin/--no-spin",
    default=None,
    help="Hearth's setting of that name.  [as the runtime has it]",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where models are kept between runs (about 8 GB).  [$HEARTH_CACHE/bench]",
)
@click.option(
    "--quick",
    is_flag=True,
    help="A toy in place of the model: a check of the bench, its figures mean nothing.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@gpu_options
@record_option
@json_option
def decode(
    names: tuple[str, ...],
    threads: int,
    cache: Path | None,
    device: str,
    record: Path | None,
    *,
    spin: bool | None,
    quick: bool,
    as_json: bool,
    **gpu: Any,
) -> int:
    """Time decode steps beside transformers, llama.cpp and the memory-read floor.

    The same weights, threads and context lengths for all; their steps take turns. On a GPU the
    engines run beside transformers, eager and compiled, with a static cache, and beside the
    memory's read bandwidth; the options from --engine on are for a GPU alone.
    """
    known = CASES if device == "cpu" else GPU_CASES
    for name in set(names).difference(known):
        raise click.BadParameter(f"{name} is no case on {device}", param_hint="--case")
    folder = cache or cache_folder() / "bench"
    if device == "cuda":
        if threads or spin is not None:
            raise click.UsageError("--threads and --spin are for the CPU alone")
        choice = gpu_choice([GPU_CASES[name] for name in names], gpu, quick=quick)
        return _on_gpu(choice, folder, record, as_json=as_json)
    if any(gpu.values()):
        raise click.UsageError("--engine, --dtype, --builder-python and --ready are for a GPU")
    cases = [CASES[name] for name in names] or _runnable()
    options = DecodeOptions(threads=threads or physical_cores(), spin=spin, quick=quick)
    figures = _run(cases, options, folder)
    publish(figures, lambda: _print(figures), as_json=as_json)
    keep_figures(record, figures, "decode")
    return _judge(figures)


def _on_gpu(choice: GPUChoice, folder: Path, record: Path | None, *, as_json: bool) -> int:
    # Cases of a GPU take minutes each: what one gave is kept, whatever becomes of the next.
    found = run_gpu(choice, folder, lambda so_far: keep_figures(record, so_far, "decode"))
    publish(found, lambda: print_gpu(found), as_json=as_json)
    return 0 if found else FAILED


def _judge(figures: Mapping[str, DecodeFigures]) -> int:
    wrong = [name for name, found in figures.items() if not found.credible]
    for name in wrong:
        note(
            f"{name}: a step at more than {SHARE_LIMIT} of the floor: the floor was disturbed, "
            "measure again on a quiet machine"
        )
    return FAILED if wrong else 0


def _runnable() -> list[Case]:
    cases = list(CASES.values())
    if not (SOURCE / "config.json").is_file():
        note(f"the shipped model is not at {SOURCE}: its case is left out")
        cases = [case for case in cases if case.model != "tiny"]
    return cases


def _run(cases: list[Case], options: DecodeOptions, cache: Path) -> dict[str, DecodeFigures]:
    logs = cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    figures: dict[str, DecodeFigures] = {}
    precision = ""
    for case in cases:
        with progress_bar() as progress:
            artifacts = prepare(case, cache, progress, quick=options.quick)
        plan = make_plan(case, options, precision)
        figures[case.name] = found = measure(case, artifacts, plan, logs, note)
        if case.model == "0.6b" and case.precision != "fp32":
            precision = found.transformers_precision
    return figures


def _print(figures: dict[str, DecodeFigures]) -> None:
    rows = [
        (
            name,
            figure(found.tokens_per_s, ".1f"),
            figure(found.step_ms),
            figure(found.floor_share),
            figure(found.floor_gb_per_s, ".1f"),
            figure(found.plain_read_share),
            f"{figure(found.transformers_ms)} {found.transformers_precision}",
            figure(found.vs_transformers),
            figure(found.llama_cpp_ms),
            figure(found.vs_llama_cpp),
        )
        for name, found in figures.items()
    ]
    print_table("Decode, one row; a ratio above 1 means that Hearth is ahead", _COLUMNS, rows)
    for name, found in figures.items():
        for peer, same in found.same_tokens.items():
            note(f"{name}: {peer} chose the same first {same} of {found.tokens} tokens")
        for text in found.notes:
            note(f"{name}: {text}")
