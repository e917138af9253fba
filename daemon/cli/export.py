"""The commands `hearth export` and `hearth weights`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.markup import escape

from hearth.daemon.cli.console import err, progress_bar, size
from hearth.daemon.cli.errors import wrong_usage
from hearth.daemon.cli.options import json_option, refuse_without, with_options
from hearth.daemon.shipped_files import shipped_model
from hearth.runtime.config import Drift, LLMEngineRunnerConfig
from hearth.runtime.engine_folder import TEMPLATE_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.tensorrt_library import built_by
from hearth.runtime.files import cache_folder

_PLAN_OPTIONS: dict[str, tuple[Any, str]] = {
    "builder": (
        click.Choice(["tensorrt", "tensorrt_rtx"]),
        "Which TensorRT builds the plan.  [tensorrt if that is there, else tensorrt_rtx]",
    ),
    "builder_python": (str, "Python that has this TensorRT, if it is another one than Hearth's."),
    "version_compatible": (bool, "Let later versions of TensorRT run the plan too."),
    "workspace_mib": (
        click.IntRange(min=0),
        "Most memory that one layer may use while it runs; 0 for no limit.  [0]",
    ),
    "optimization_level": (
        click.IntRange(0, 5),
        "How long the builder looks for fast kernels.  [its own choice]",
    ),
    "kv_cache_dtype": (
        click.Choice(["auto", "float32"]),
        (
            "float32 keeps caches wider than a type of 16 bits.  [auto: --dtype, and float32 for "
            "TensorRT 8.6, which widens them in every step]"
        ),
    ),
    "timing_cache": (
        click.Path(path_type=Path, dir_okay=False),
        "File that keeps measured times from one build to the next.  [in the cache folder]",
    ),
}
plan_options = with_options(_PLAN_OPTIONS)
"""Adds the options to a command."""


def take_plan(options: dict[str, Any]) -> Any:
    """Remove the plan's options from `options`; the `PlanOptions`, or None without a plan.

    Raises `click.UsageError` naming an option that was given without a plan.
    """
    from hearth.runtime.export.options import PlanOptions  # noqa: PLC0415 - slow import

    given = {name: options.pop(name) for name in _PLAN_OPTIONS}
    if options["backend"] != "tensorrt":
        refuse_without("--backend tensorrt", given)
        return None
    return PlanOptions(
        builder=given["builder"] or "auto",
        python=given["builder_python"] or sys.executable,
        version_compatible=bool(given["version_compatible"]),
        workspace_bytes=(given["workspace_mib"] or 0) << 20,
        optimization_level=given["optimization_level"],
        kv_cache_dtype=given["kv_cache_dtype"] or "auto",
        timing_cache=given["timing_cache"] or cache_folder() / "tensorrt-timing.cache",
    )


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them; raises BadParameter for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers like 1,2,3") from None


_DRAFT_OPTIONS: dict[str, tuple[Any, str]] = {
    "draft": (
        click.Path(path_type=Path),
        "Hugging Face folder of an EAGLE-3 draft for this model, to speculate with.",
    ),
    "eagle_layers": (
        numbers,
        (
            "Layers of the model whose inputs the draft reads, with commas between them.  [as the "
            "draft says; else 2, half of them, and the third from the end]"
        ),
    ),
    "max_verify_tree_size": (
        click.IntRange(min=0),
        (
            "Most nodes of a token tree that are verified in one step; 0 for 60, or the capacity "
            "where that is less.  [0]"
        ),
    ),
    "max_draft_tree_size": (
        click.IntRange(min=0),
        "Most slots of a draft's proposal, its tokens a node times its levels; 0 as above.  [0]",
    ),
    "drafting_top_k": (
        click.IntRange(min=1),
        "Tokens that a TensorRT plan proposes after a node.  [10]",
    ),
    "drafting_step": (
        click.IntRange(min=1),
        "Levels of the trees that a TensorRT plan proposes.  [6]",
    ),
    "verify": (
        click.Choice(["auto", "trees", "chains"]),
        "Shape of the proposals of an engine of ONNX Runtime; auto takes trees.  [auto]",
    ),
}
draft_options = with_options(_DRAFT_OPTIONS)
"""Adds the options to a command."""


def take_draft(options: dict[str, Any]) -> Any:
    """Remove the draft's options from `options`; the `DraftOptions`, or None without a draft.

    Raises `click.UsageError` naming an option that was given without a draft.
    """
    from hearth.runtime.export import DraftOptions  # noqa: PLC0415 - slow import

    given = {name: value for name in _DRAFT_OPTIONS if (value := options.pop(name)) is not None}
    folder = given.pop("draft", None)
    if folder is None:
        refuse_without("--draft", given)
        return None
    return DraftOptions(folder=shipped_model(folder), **given)


if TYPE_CHECKING:
    from hearth.runtime.vision_config import VisionConfig


def projections(text: str) -> tuple[str, ...]:
    """Names with commas between them; what is none of a projection is refused with the others."""
    return tuple(text.split(","))


_OPTIONS: dict[str, tuple[Any, str]] = {
    "backend": (
        click.Choice(["kernels", "onnxruntime", "tensorrt"]),
        (
            "What is to run the engine: Hearth's own kernels for NVIDIA GPUs, ONNX Runtime, or a "
            "TensorRT plan, built for this GPU.  [kernels on cuda, else onnxruntime]"
        ),
    ),
    "dialect": (
        click.Choice(["auto", "native", "classic"]),
        "Form of the graph; auto is the best that this ONNX Runtime reads.  [auto]",
    ),
    "dtype": (
        click.Choice(["float32", "float16", "bfloat16"]),
        (
            "Type of weights that are not quantised, and of the cache.  [float32; for a GPU the "
            "checkpoint's own of 16 bits, else float16; for plans float16]"
        ),
    ),
    "device": (
        click.Choice(["cpu", "cuda"]),
        "Where the engine is to run.  [cpu; cuda for kernels and plans]",
    ),
    "quantization": (
        click.Choice(["none", "int8", "int4"]),
        "Store the weights of matrix products with fewer bits.  [none]",
    ),
    "head_quantization": (
        click.Choice(["auto", "body", "none", "int8", "int4"]),
        (
            "Those of the product that gives the logits; body is as those of all others, auto too, "
            "but int8 for int4 of models below 500M parameters.  [auto]"
        ),
    ),
    "block_size": (
        click.IntRange(min=0),
        "Weights that share one scale; 0 for 128 (int8), 32 (int4), or less if need be.  [0]",
    ),
    "capacity": (
        click.IntRange(min=0),
        "Tokens a row may hold; 0 for the model's positions, at most 4096.  [0]",
    ),
    "max_batch": (click.IntRange(min=1), "Rows that may run together.  [8]"),
    "prefill_chunk": (
        click.IntRange(min=0),
        "Longest piece of a prompt in one step; 0 for 256, or the capacity if less.  [0]",
    ),
    "max_patches": (
        click.IntRange(min=0),
        "Largest picture of a model that sees, in patches of its tower; 0 for 4096.  [0]",
    ),
    "max_lora_rank": (
        click.IntRange(min=0),
        "Greatest rank of the adapters that the engine takes; 0 for no adapters.  [0]",
    ),
    "lora_targets": (
        projections,
        "Projections that adapters may add to, of q,k,v,o,gate,up,down; fewer cost less.  [all]",
    ),
    "name": (str, "What the model is called where it is served.  [as ENGINE_DIR]"),
    "external_weights": (
        bool,
        "Keep the weights beside the graph, which then serves every fine-tune (hearth weights).",
    ),
}


def _refuse_operators(_context: click.Context, _option: click.Parameter, kind: str | None) -> None:
    """Say what became of an option, for one version."""
    if kind is not None:
        raise click.UsageError(
            "--operators is gone: engines of --backend onnxruntime have standard operators, and "
            "kernels, the default of --device cuda, are in the place of contrib"
        )


@click.command()
@click.argument("source", metavar="MODEL_DIR", type=click.Path(path_type=Path))
@click.argument("target", metavar="ENGINE_DIR", type=click.Path(path_type=Path))
@click.option("--operators", hidden=True, expose_value=False, callback=_refuse_operators)
@with_options(_OPTIONS)
@draft_options
@plan_options
@json_option
def export(source: Path, target: Path, *, as_json: bool, **options: Any) -> None:
    """Build the engine folder ENGINE_DIR from the Hugging Face folder MODEL_DIR.

    MODEL_DIR holds config.json, safetensors files, tokenizer.json and a chat template, and for a
    model that takes images its processor's files. A draft's engine lies in the folder draft inside,
    a vision tower in the folder visual. A failed export leaves nothing behind. home and home-vision
    are the models that ship with Hearth.
    """
    from hearth.runtime.export import ExportOptions, export_model  # noqa: PLC0415 - slow import
    from hearth.runtime.export.export import gpu_dtype  # noqa: PLC0415 - likewise
    from hearth.runtime.export.options import check_options  # noqa: PLC0415 - likewise

    began = time.monotonic()
    options["plan"], options["draft"] = take_plan(options), take_draft(options)
    if options["device"] is None and options["backend"] == "kernels":
        options["device"] = "cuda"
    given = {name: value for name, value in options.items() if value is not None}
    on_gpu = options["plan"] is not None or options["device"] == "cuda"
    asked = ExportOptions(**({"dtype": "float16"} if on_gpu else {}) | given)
    with wrong_usage():
        check_options(asked)
    if on_gpu and "dtype" not in given:
        asked = msgspec.structs.replace(asked, dtype=gpu_dtype(shipped_model(source), asked))
    with progress_bar() as progress:
        config = export_model(shipped_model(source), target, asked, progress)
    total = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    warnings, seconds = list(_warnings(target)), time.monotonic() - began
    if as_json:
        told = {"engine": str(target), "bytes": total, "seconds": seconds, "warnings": warnings}
        click.echo(msgspec.json.encode(told | {"drift": config.drift}))
        return
    for warning in warnings:
        err().print(f"[yellow]note[/] {escape(warning)}")
    if config.drift is not None:
        err().print(f"[dim]drift: {_drift(config.drift)}[/]")
    err().print(
        f"[green]done[/] {_form(config)}, {size(total)} in {seconds:.1f} s\n"
        f"[dim]next: hearth serve --engine {escape(shlex.quote(str(target)))}[/]"
    )


def _form(config: LLMEngineRunnerConfig) -> str:
    """Summary of an engine: its model, its backend and its types."""
    drafted = ", with draft" if config.enable_eagle_spec_decode else ""
    form = "kernels" if config.backend == "kernels" else config.dialect
    builder = f", {built_by(config.plan)}" if config.plan else ""
    body, head = config.weight_quantization, config.head_weights
    kinds = [f"{body} weights"] if body != "none" else []
    kinds += [f"{head} head"] if head not in (body, "none") else []
    dtype = ", ".join([*kinds, f"{config.dtype} else"]) if kinds else config.dtype
    return f"{config.architecture}{drafted}, {form}{builder}, {dtype}"


def _drift(drift: Drift) -> str:
    return (
        f"of {drift.positions} tokens {drift.same} have the same likeliest successor as without "
        f"quantisation; divergence {drift.mean:.2g} nats on average, {drift.largest:.2g} at most"
    )


def _warnings(folder: Path) -> Iterator[str]:
    """Warnings of `hearth serve` about the new folder on this machine."""
    from hearth.daemon.check import inspect_engine  # noqa: PLC0415 - slow import
    from hearth.daemon.configuration.settings import settings_of  # noqa: PLC0415 - likewise
    from hearth.runtime.vision_config import load_vision_config  # noqa: PLC0415 - likewise

    if not (folder / TEMPLATE_FILE).exists():
        yield "the model has no chat template: raw prompts alone can be served"
    if (tower := load_vision_config(folder)) is not None:
        yield _smaller(tower)
    try:
        reason = inspect_engine(settings_of(verify=False), folder).reason
    except HearthError as error:
        reason = error.message
    if reason is not None:
        yield f"this machine cannot serve it as it is: {reason}"


def _smaller(tower: VisionConfig) -> str:
    """Above which size pictures are made smaller, and what would take larger ones."""
    from hearth.runtime.image_processing.sizes import largest_square  # noqa: PLC0415 - slow import

    side = largest_square(tower)
    said = f"pictures with more pixels than {side} x {side} are made smaller"
    trained = largest_square(msgspec.structs.replace(tower, max_patches=sys.maxsize))
    if trained <= side:
        return said
    patches = (trained // tower.patch_size) ** 2
    return f"{said}; --max-patches {patches} takes them up to {trained} x {trained}, as trained"


@click.command()
@click.argument("source", metavar="MODEL_DIR", type=click.Path(path_type=Path))
@click.argument("target", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--engine",
    required=True,
    metavar="ENGINE_DIR",
    help="The engine folder that is to serve them: of kernels, or with --external-weights.",
)
def weights(source: Path, target: Path, engine: str) -> None:
    """Write the weights of the Hugging Face folder MODEL_DIR into FILE, for an engine folder.

    The model has the shape and the tokenizer of the engine's: a fine-tune of it, say. The engine
    folder stays as it is. A failed run leaves nothing behind.
    """
    from hearth.runtime.export.export import export_weights  # noqa: PLC0415 - slow import

    began = time.monotonic()
    with progress_bar() as progress:
        written = export_weights(source, Path(engine), target, progress)
    one, other = (escape(shlex.quote(str(path))) for path in (engine, target))
    err().print(
        f"[green]done[/] {size(written.nbytes)} in {time.monotonic() - began:.1f} s\n"
        f"[dim]next: hearth serve --engine {one} --weights {other}[/]"
    )
