"""The command `hearth bench decode`, for the CPU and for a GPU."""

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec import structs

from hearth.bench.contenders.contender import missing
from hearth.bench.decode.cases import (
    CASES,
    ENGINES,
    GPU_CASES,
    PEERS,
    Case,
    GPUCase,
    GPUEngine,
    GPUModel,
    chosen_cases,
    export_options,
    gguf_type,
    gpu_engine,
    pooled_gguf,
    prepare,
    shape_source,
)
from hearth.bench.decode.contest import Contest
from hearth.bench.decode.cpu import SHARE_LIMIT, DecodeFigures, Plan, measure
from hearth.bench.decode.gpu import GPUModels, GPUPlan, measure_gpu
from hearth.bench.decode.gpu_figures import GPUFigures, compare_cases, share_best_read
from hearth.bench.one_row import builder_option, cache_option, device_option, quick_option
from hearth.bench.report import (
    Record,
    judged,
    log_folder,
    note,
    print_cases,
    publish,
    record_option,
)
from hearth.daemon.cli.console import progress_bar
from hearth.daemon.cli.errors import FAILED
from hearth.daemon.cli.options import json_option
from hearth.daemon.gpu_facts import gpu_facts, serving_library
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import physical_cores
from hearth.runtime.executor.simulated_engine import simulated_config

Name = TypeVar("Name")
_NONE = "none"
_LIBRARIES = ("torch", "transformers", "llama_cpp", "gguf")
_FIELDS = (
    "tokens_per_s step_ms floor_share floor_gb_per_s plain_read_share transformers_ms "
    "transformers_precision vs_transformers llama_cpp_ms vs_llama_cpp"
)
_GPU_FIELDS = (
    "step_ms host_us tokens_per_s bandwidth_share raw_ms actor_over_raw vs_transformers "
    "vs_torch_compile vs_llama_cpp llama_cpp_type vs_ort_cuda tokens_vs_batch_1 over_short dtype"
)


def _refuse_earlier(_context: click.Context, _option: click.Parameter, file: str | None) -> None:
    """Name what took the place of an option, for one version."""
    if file is not None:
        raise click.UsageError("--earlier is `python -m tools.compare_earlier` in the repository")


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
    "--spin/--no-spin", default=None, help="Hearth's setting of that name.  [as the runtime has it]"
)
@cache_option
@quick_option
@device_option
@click.option(
    "--engine",
    "engines",
    multiple=True,
    type=click.Choice(list(ENGINES)),
    help="Measure this engine only; may be given more than once.  [all]",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice([*PEERS, _NONE]),
    help="Measure beside this peer only; may be given more than once.  [all]",
)
@click.option(
    "--daemon",
    "daemons",
    multiple=True,
    type=click.Choice([*ENGINES, _NONE]),
    help="Only this engine also through a daemon; may be given more than once.  [all]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16"]),
    help="Type of weights and cache, for the peers too.  [float16]",
)
@builder_option
@click.option(
    "--ready",
    multiple=True,
    metavar="ENGINE/MODEL=DIR",
    help="Use this engine folder in place of an export; may be given more than once.",
)
@click.option("--earlier", hidden=True, expose_value=False, callback=_refuse_earlier)
@record_option
@json_option
def decode(
    names: tuple[str, ...],
    threads: int,
    cache: Path,
    device: str,
    record: Record,
    *,
    spin: bool | None,
    quick: bool,
    as_json: bool,
    **gpu: Any,
) -> int:
    """Time decode steps beside transformers, llama.cpp and the memory-read floor.

    The same weights, threads and context lengths for all; their steps take turns. On a GPU the
    engines run beside transformers, eager and compiled, with a static cache, llama.cpp and the
    memory's read bandwidth; the options from --engine on are for a GPU alone.
    """
    known = CASES if device == "cpu" else GPU_CASES
    for name in set(names).difference(known):
        raise click.BadParameter(f"{name} is no case on {device}", param_hint="--case")
    if device == "cuda":
        if threads or spin is not None:
            raise click.UsageError("--threads and --spin are for the CPU alone")
        gpu_cases = [GPU_CASES[name] for name in names or GPU_CASES]
        plan = gpu_plan(gpu, quick=quick)
        gpu_facts()
        _tell_missing()
        # Cases of a GPU take minutes each: what one gave is kept, whatever becomes of the next.
        on_gpu = run_gpu(gpu_cases, plan, cache, record.keep)
        title = "Decode on the GPU; vs a peer, above 1 means that Hearth is ahead"
        publish(on_gpu, lambda: print_cases(title, _GPU_FIELDS, on_gpu), as_json=as_json)
        return 0 if on_gpu else FAILED
    if any(gpu.values()):
        raise click.UsageError("the options from --engine to --ready are for a GPU")
    cases = chosen_cases(names)
    _tell_missing()
    plan_here = Plan(threads=threads or physical_cores(), spin=spin)
    if quick:
        plan_here = structs.replace(plan_here, rounds=2, steps=2)
    figures = _run(cases, plan_here, cache, quick=quick)
    publish(figures, lambda: _print(figures), as_json=as_json)
    record.keep(figures)
    return judged(
        f"{name}: a step at more than {SHARE_LIMIT} of the floor: the floor was disturbed, "
        "measure again on a quiet machine"
        for name, found in figures.items()
        if not found.credible
    )


def gpu_plan(given: Mapping[str, Any], *, quick: bool) -> GPUPlan:
    """The plan that the values of the GPU's options mean; raises click.BadParameter."""
    ready: dict[str, Path] = {}
    models = dict.fromkeys(case.model for case in GPU_CASES.values())
    known = [f"{engine}/{model}" for engine in ENGINES for model in models]
    for text in given["ready"]:
        key, _, folder = text.partition("=")
        if key not in known or not folder:
            raise click.BadParameter(f"{text} is not ENGINE/MODEL=DIR", param_hint="--ready")
        if not Path(folder).is_dir():
            raise click.BadParameter(f"there is no folder {folder}", param_hint="--ready")
        ready[key] = Path(folder)
    plan = GPUPlan(
        engines=given["engines"] or ENGINES,
        peers=_named(given["peers"]) or (() if given["peers"] else PEERS),
        daemons=_named(given["daemons"]) or (() if given["daemons"] else ENGINES),
        dtype=given["dtype"] or "float16",
        builder_python=given["builder_python"] or sys.executable,
        ready=ready,
        quick=quick,
    )
    return structs.replace(plan, rounds=2, steps=5, host_steps=5) if quick else plan


def _named(names: tuple[Name, ...]) -> tuple[Name, ...]:
    return tuple(name for name in names if name != _NONE)


def _tell_missing() -> None:
    absent = [name for name in _LIBRARIES if find_spec(name) is None]
    if absent:
        note(f"measured without some peers: {missing(absent)}")


def _run(
    cases: Sequence[Case], plan: Plan, cache: Path, *, quick: bool
) -> dict[str, DecodeFigures]:
    figures: dict[str, DecodeFigures] = {}
    for case in cases:
        with progress_bar() as progress:
            artifacts = prepare(case, cache, progress, quick=quick)
        contest = Contest(case.name, log_folder(cache), note)
        figures[case.name] = found = measure(case, artifacts, plan, contest)
        if case.model == "0.6b" and case.precision != "fp32":
            plan = structs.replace(plan, precision=found.transformers_precision)
    return figures


def run_gpu(
    cases: Sequence[GPUCase],
    plan: GPUPlan,
    cache: Path,
    keep: Callable[[Mapping[str, GPUFigures]], None],
) -> dict[str, GPUFigures]:
    """Figures by `engine/model/bN`; a case that cannot run is reported and has none.

    `keep` is called with the figures so far after every case.
    """
    plan = structs.replace(plan, engines=tuple(filter(_is_served, plan.engines)))
    figures: dict[str, GPUFigures] = {}
    for model in dict.fromkeys(case.model for case in cases if plan.engines):
        models = gpu_models(model, plan, cache)
        for case in (case for case in cases if case.model == model and models.folders):
            contest = Contest(case.name, log_folder(cache), note)
            found = measure_gpu(case, models, plan, contest)
            figures.update({f"{engine}/{case.name}": one for engine, one in found.items()})
            compare_cases(figures, cases)
            share_best_read(figures)
            keep(figures)
    return figures


def _is_served(engine: GPUEngine) -> bool:
    options = export_options(engine, "float16", sys.executable)
    config = structs.replace(simulated_config(), device="cuda", backend=options.engine)
    try:
        serving_library(config)
    except HearthError as error:
        note(f"{engine} is left out: {error}")
        return False
    return True


def gpu_models(model: GPUModel, plan: GPUPlan, cache: Path) -> GPUModels:
    """The files of a model that a plan wants, made if they are not in `cache`."""
    peers = shape_source(model, cache, quick=plan.quick)
    kinds = dict.fromkeys(gguf_type(engine, plan.dtype) for engine in plan.engines)
    note(f"{model}: making what is not kept yet")
    with ThreadPoolExecutor() as pool:
        files = {
            kind: pool.submit(pooled_gguf, model, kind, cache, quick=plan.quick)
            for kind in (kinds if "llama_cpp" in plan.peers else ())
        }
        folders = {
            engine: pool.submit(_gpu_folder, engine, model, plan, cache) for engine in plan.engines
        }
        return GPUModels(
            peers,
            {engine: folder for engine, made in folders.items() if (folder := made.result())},
            {kind: file for kind, made in files.items() if (file := made.result())},
        )


def _gpu_folder(engine: GPUEngine, model: GPUModel, plan: GPUPlan, cache: Path) -> Path | None:
    options = export_options(engine, plan.dtype, plan.builder_python)
    ready = plan.ready.get(f"{engine}/{model}")
    try:
        return ready or gpu_engine(engine, model, options, cache, _no_progress, quick=plan.quick)
    except HearthError as error:
        note(f"{engine}/{model} is left out: {error}")
        return None


def _no_progress(_stage: str, _done: int, _total: int) -> None:
    """Several are made at once: a bar for each would tell nothing."""


def _print(figures: Mapping[str, DecodeFigures]) -> None:
    print_cases("Decode, one row; vs a peer, above 1 means that Hearth is ahead", _FIELDS, figures)
    for name, found in figures.items():
        for peer, same in found.same_tokens.items():
            note(f"{name}: {peer} chose the same first {same} of {found.tokens} tokens")
        for text in found.notes:
            note(f"{name}: {text}")
