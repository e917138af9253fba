from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.markup import escape

from hearth.daemon.check import (
    BoundTensor,
    Report,
    Tower,
    inspect_engine,
    with_answer,
    with_bindings,
)
from hearth.daemon.cli.console import out, progress_bar, size, table
from hearth.daemon.cli.errors import FAILED, Failure
from hearth.daemon.cli.options import json_option, settings_from, settings_options
from hearth.daemon.configuration.settings import Settings
from hearth.daemon.engine_settings import runtime_options
from hearth.daemon.kernel_cache import (
    KernelCache,
    Progress,
    check_has_kernels,
    compile_kernels,
    gpu_at_hand,
    kernel_cache,
    targets_of,
)
from hearth.daemon.shipped import engine_folder, wants_kernels
from hearth.runtime.config import load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.tensorrt_library import RTX_GPUS, built_by
from hearth.runtime.generation.deployment import DeploymentConfig, load_deployment


@click.command()
@settings_options(
    "engine",
    "weights",
    "engine_kind",
    "device",
    "step_ms",
    "threads",
    "spin",
    "verify",
    "max_batch",
    "capacity",
    "speculation",
    "draft_tree",
    "lookup_tokens",
)
@click.option(
    "--answer", is_flag=True, help="Load the engine and compare its answer with the known one."
)
@click.option(
    "--bindings", is_flag=True, help="Load the engine and list its bindings and their shapes."
)
@click.option(
    "--compile",
    "compiles",
    is_flag=True,
    help="Compile the kernels that are missing for this GPU, as the first start does else.",
)
@click.option(
    "--compile-for",
    multiple=True,
    metavar="CAPABILITY[:N]",
    help="Compile them for another GPU, and do no more: compute capability and multiprocessors, "
    "such as 8.7:16; may be given more than once. No GPU is needed.",
)
@json_option
def check(
    config: Path | None,
    *,
    answer: bool,
    bindings: bool,
    compiles: bool,
    compile_for: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> int:
    """Say what hearth serve would use, and whether it fits, without loading the engine.

    The exit code is 1 when it cannot be served, and the reason is printed.
    """
    if compile_for and (answer or bindings or compiles):
        raise click.UsageError("--compile-for does no more than that: leave the others out")
    if as_json:
        return _print_json(
            config,
            flags,
            answer=answer,
            bindings=bindings,
            compiles=compiles,
            compile_for=compile_for,
        )
    settings = settings_from(config, flags)
    if compile_for:
        made = _compile_for(settings, compile_for)
        out().print(
            f"[green]done[/]: {made.compiled} kernels are there for {', '.join(compile_for)}"
        )
        return 0
    report = _inspect(settings, answer=answer, bindings=bindings, compiles=compiles)
    out().print(table(_rows(report)))
    if report.bindings:
        out().print()
        out().print(table([_bound(one) for one in report.bindings]))
    for warning in (*settings.warnings, *([report.outdated] if report.outdated else [])):
        out().print(f"[yellow]warning[/] {escape(warning)}")
    if not report.ok:
        raise Failure(f"this cannot be served: {report.reason}")
    out().print("[green]ready[/]: start it with hearth serve and the same options")
    return 0


def _inspect(settings: Settings, *, answer: bool, bindings: bool, compiles: bool) -> Report:
    with progress_bar() as progress:
        folder = engine_folder(settings.engine, progress, kernels=wants_kernels(settings))
        kernels_of = _compiled(progress) if compiles else kernel_cache
        if compiles:
            check_has_kernels(load_config(folder))
        report = inspect_engine(settings, folder, kernels_of)
    if answer:
        report = with_answer(report, settings, folder)
    return with_bindings(report, settings, folder) if bindings else report


def _compiled(progress: Progress) -> Callable[[Path, DeploymentConfig], KernelCache]:
    def compiled(folder: Path, deployment: DeploymentConfig) -> KernelCache:
        return compile_kernels(folder, deployment, [gpu_at_hand()], progress)

    return compiled


def _compile_for(settings: Settings, names: Sequence[str]) -> KernelCache:
    targets = [target for name in names for target in targets_of(name)]
    with progress_bar() as progress:
        folder = engine_folder(settings.engine, progress, kernels=wants_kernels(settings))
        check_has_kernels(load_config(folder))
        deployment = load_deployment(folder, runtime_options(settings))
        return compile_kernels(folder, deployment, targets, progress)


def _print_json(
    config: Path | None,
    flags: dict[str, Any],
    *,
    answer: bool,
    bindings: bool,
    compiles: bool,
    compile_for: tuple[str, ...],
) -> int:
    try:
        settings = settings_from(config, flags)
        if compile_for:
            made = _compile_for(settings, compile_for)
            click.echo(msgspec.json.encode({"ok": True, "kernels": made}))
            return 0
        report = _inspect(settings, answer=answer, bindings=bindings, compiles=compiles)
    except HearthError as error:
        reason = {"ok": False, "reason": error.message, "code": error.code, "field": error.field}
        click.echo(msgspec.json.encode(reason))
        return FAILED
    click.echo(msgspec.json.encode(report))
    return 0 if report.ok else FAILED


def _rows(report: Report) -> list[tuple[str, str]]:
    return [
        ("engine", report.engine),
        ("architecture", report.architecture),
        ("device", _device(report)),
        ("runs on", _runs_on(report)),
        *_plan_rows(report),
        ("weights", f"{report.dtype}, quantization {report.quantization}{_whose(report)}"),
        ("cache", report.kv_cache_dtype),
        ("adapters", f"up to rank {rank}" if (rank := report.max_lora_rank) else "takes none"),
        ("speculation", report.speculation),
        ("batch", f"{report.max_batch} rows"),
        *([("chosen", report.chosen)] if report.chosen else []),
        ("capacity", f"{report.capacity} tokens a row, prompts up to {report.max_prompt_tokens}"),
        *((f"memory: {part}", size(count)) for part, count in report.memory.items()),
        ("memory needed", f"{size(report.memory_needed)}, for {_rows_of(report)}"),
        ("memory free", size(report.memory_available)),
        *_host_rows(report),
        ("known answer", _answer(report)),
        *_tower_rows(report.tower),
    ]


def _rows_of(report: Report) -> str:
    """Describe the rows that the memory is for, and the option to need less."""
    less = "--max-batch or --capacity" if report.max_batch > 1 else "--capacity"
    rows = f"{report.max_batch} full rows" if report.max_batch > 1 else "one full row"
    return f"{rows} of {report.capacity} tokens: less by {less}"


def _bound(binding: BoundTensor) -> tuple[str, str]:
    """A binding's name, and its type and shapes by profile: the smallest and the largest."""
    ranges = [(_sizes(shapes[0]), _sizes(shapes[-1])) for shapes in binding.shapes]
    each = [low if low == high else f"{low} to {high}" for low, high in ranges]
    return binding.name, "; ".join([binding.dtype, *each])


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _runs_on(report: Report) -> str:
    library = report.library or "nothing here"
    if report.engine_kind == "kernels":
        return f"Hearth's own kernels, compiled by {library}{_cached(report.kernels)}"
    return f"{library}, {report.dialect} dialect"


def _cached(kernels: KernelCache | None) -> str:
    if kernels is None:
        return ""
    if kernels.compiled == kernels.wanted:
        return f": all {kernels.wanted} are there"
    return f": {kernels.compiled} of {kernels.wanted} are there, the others take a first start"


def _whose(report: Report) -> str:
    return f", those of {report.weights}" if report.weights else ""


def _tower_rows(tower: Tower | None) -> list[tuple[str, str]]:
    if tower is None:
        return []
    shape = f"{tower.family}, {tower.layers} layers, {tower.dtype}, {tower.dialect} dialect"
    given, answer = tower.answer, "not compared"
    if given is not None:
        allowed = f"none off by more than {given.error:.2g} of what is allowed"
        answer = f"right: {given.compared} sums, {allowed}"
    return [
        ("vision tower", shape),
        ("images", f"{tower.image_tokens} tokens for a large one"),
        ("tower's answer", answer),
    ]


def _answer(report: Report) -> str:
    given = report.answer_report
    if given is None:
        return report.answer
    return f"{report.answer}: {given.meaning}"


def _device(report: Report) -> str:
    gpu = report.gpu
    if report.device == "cpu":
        return f"cpu, {report.threads} threads"
    if gpu is None:
        return "cuda, no GPU can be asked"
    major, minor = gpu.compute_capability
    shared = ", memory shared with the host" if gpu.memory_free is None else ""
    return f"{gpu.name}, compute capability {major}.{minor}, driver for CUDA {gpu.driver}{shared}"


def _plan_rows(report: Report) -> list[tuple[str, str]]:
    plan = report.plan
    if plan is None:
        return []
    also = ", also for later versions" if plan.version_compatible else ""
    built_for = f"{plan.gpu_name}, compute capability {plan.compute_capability}"
    if plan.builder == "tensorrt_rtx":
        built_for = f"any GPU of {RTX_GPUS}"
    return [("plan built by", f"{built_by(plan)}{also}"), ("plan built for", built_for)]


def _host_rows(report: Report) -> list[tuple[str, str]]:
    if not report.host_memory:
        return []
    return [
        *((f"host memory: {part}", size(count)) for part, count in report.host_memory.items()),
        ("host memory needed", size(report.host_memory_needed)),
        ("host memory free", size(report.host_memory_available)),
    ]
