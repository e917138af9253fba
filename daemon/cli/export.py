import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from daemon.cli.console import err, progress_bar, size
from daemon.cli.draft_options import draft_options, take_draft
from daemon.cli.errors import wrong_usage
from daemon.cli.plan_options import plan_options, take_plan
from runtime.engine_folder import TEMPLATE_FILE
from runtime.errors import HearthError


@click.command()
@click.argument("source", metavar="MODEL_DIR", type=click.Path(path_type=Path))
@click.argument("target", metavar="ENGINE_DIR", type=click.Path(path_type=Path))
@click.option(
    "--backend",
    type=click.Choice(["onnxruntime", "tensorrt"]),
    default="onnxruntime",
    show_default=True,
    help="What is to run the engine; tensorrt builds a plan for the GPU of this machine.",
)
@click.option(
    "--dialect",
    type=click.Choice(["auto", "native", "classic"]),
    default="auto",
    show_default=True,
    help="Form of the graph; auto is the best that this ONNX Runtime reads.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Type of weights that are not quantised, and of the cache.  [float32; for a GPU float16]",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where ONNX Runtime is to run the engine.",
)
@click.option(
    "--operators",
    type=click.Choice(["auto", "standard", "contrib"]),
    default="auto",
    show_default=True,
    help="contrib are ONNX Runtime's own; auto takes them on cuda where they serve the model.",
)
@click.option(
    "--quantization",
    type=click.Choice(["none", "int8", "int4"]),
    default="none",
    show_default=True,
    help="Store the weights of matrix products with fewer bits.",
)
@click.option(
    "--block-size",
    type=click.IntRange(min=0),
    default=0,
    help="Weights that share one scale when quantised; 0 for 128 (int8) or 32 (int4), or less "
    "where a layer asks for it.  [0]",
)
@click.option(
    "--capacity",
    type=click.IntRange(min=0),
    default=0,
    help="Tokens a row may hold; 0 for the model's positions, at most 4096.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Rows that may run together.",
)
@click.option(
    "--prefill-chunk",
    type=click.IntRange(min=0),
    default=0,
    help="Longest piece of a prompt in one step; 0 for 256, or the capacity where that is less.  "
    "[0]",
)
@draft_options
@plan_options
def export(source: Path, target: Path, **options: Any) -> None:
    """Build the engine folder ENGINE_DIR from the Hugging Face folder MODEL_DIR.

    MODEL_DIR holds config.json, safetensors files, tokenizer.json and a chat template. A draft's
    engine lies in the folder draft inside. A failed export leaves nothing behind.
    """
    from runtime.export import ExportOptions, export_model  # noqa: PLC0415 - slow import
    from runtime.export.options import check_options  # noqa: PLC0415

    began = time.monotonic()
    options["plan"], options["draft"] = take_plan(options), take_draft(options)
    if options["dtype"] is None:
        on_cpu = options["plan"] is None and options["device"] == "cpu"
        options["dtype"] = "float32" if on_cpu else "float16"
    asked = ExportOptions(**options)
    with wrong_usage():
        check_options(asked)
    with progress_bar() as progress:
        config = export_model(source, target, asked, progress)
    total = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    drafted = ", with draft" if config.enable_eagle_spec_decode else ""
    for warning in _warnings(target):
        err().print(f"[yellow]note[/] {escape(warning)}")
    err().print(
        f"[green]done[/] {config.architecture}{drafted}, {config.dialect}, {config.dtype}, "
        f"{size(total)} in {time.monotonic() - began:.1f} s\n"
        f"[dim]next: hearth serve --engine {escape(shlex.quote(str(target)))}[/]"
    )


def _warnings(folder: Path) -> Iterator[str]:
    """What `hearth serve` would say of the new folder on this machine."""
    from daemon.check import inspect_engine  # noqa: PLC0415 - slow import
    from daemon.configuration.settings import Settings  # noqa: PLC0415

    if not (folder / TEMPLATE_FILE).exists():
        yield "the model has no chat template: raw prompts alone can be served"
    try:
        reason = inspect_engine(Settings(verify=False), folder).reason
    except HearthError as error:
        reason = error.message
    if reason is not None:
        yield f"this machine cannot serve it as it is: {reason}"
