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

from daemon.cli.console import err, progress_bar, size
from daemon.cli.draft_options import draft_options, take_draft
from daemon.cli.errors import wrong_usage
from daemon.cli.options import json_option, with_options
from daemon.cli.plan_options import plan_options, take_plan
from daemon.shipped_files import shipped_model
from runtime.config import Drift, LLMEngineRunnerConfig
from runtime.engine_folder import TEMPLATE_FILE
from runtime.errors import HearthError
from runtime.executor.tensorrt.manifest import built_by

if TYPE_CHECKING:
    from runtime.vision_config import VisionConfig


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


@click.command()
@click.argument("source", metavar="MODEL_DIR", type=click.Path(path_type=Path))
@click.argument("target", metavar="ENGINE_DIR", type=click.Path(path_type=Path))
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
    from runtime.export import ExportOptions, export_model  # noqa: PLC0415 - slow import
    from runtime.export.export import gpu_dtype  # noqa: PLC0415 - likewise
    from runtime.export.options import check_options  # noqa: PLC0415 - likewise

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
    """An engine in a few words: what it computes, by what, and in which types."""
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
    """What `hearth serve` would say of the new folder on this machine."""
    from daemon.check import inspect_engine  # noqa: PLC0415 - slow import
    from daemon.configuration.settings import settings_of  # noqa: PLC0415 - likewise
    from runtime.vision_config import load_vision_config  # noqa: PLC0415 - likewise

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
    from runtime.pictures.sizes import largest_square  # noqa: PLC0415 - slow import

    side = largest_square(tower)
    said = f"pictures with more pixels than {side} x {side} are made smaller"
    trained = largest_square(msgspec.structs.replace(tower, max_patches=sys.maxsize))
    if trained <= side:
        return said
    patches = (trained // tower.patch_size) ** 2
    return f"{said}; --max-patches {patches} takes them up to {trained} x {trained}, as trained"
