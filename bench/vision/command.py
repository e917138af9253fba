"""The command `hearth bench vision`."""

from pathlib import Path

import click
from msgspec import structs

from hearth.bench.contenders.contender import Device
from hearth.bench.decode.cases import exported
from hearth.bench.report import (
    Record,
    log_folder,
    note,
    print_cases,
    print_fields,
    publish,
    record_option,
)
from hearth.bench.vision.figures import VisionFigures
from hearth.bench.vision.session import VisionPlan, VisionSession
from hearth.daemon.cli.console import progress_bar
from hearth.daemon.cli.options import json_option
from hearth.daemon.gpu_facts import gpu_facts
from hearth.daemon.shipped import VISION
from hearth.runtime.config import CONFIG_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions
from hearth.runtime.export.options import TargetType
from hearth.runtime.files import cache_folder

_EXAM = 50
_FIELDS = (
    "tokens decode_ms resize_ms engine_ms hand_over_ms prefill_ms ttft_ms transformers_ttft_ms "
    "ttft_vs_transformers preprocess_vs_transformers"
)


@click.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The checkpoint, in Hugging Face's layout.  [the shipped model's vision variant]",
)
@click.option(
    "--engine",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="An engine folder that was made from it.  [exported, and kept in the cache]",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Type of weights and cache, for the peer too.  [float32; float16 on a GPU]",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the engine folder is kept.  [$HEARTH_CACHE/bench]",
)
@click.option(
    "--exam",
    type=click.IntRange(0, 10_000),
    help="Questions of each group of the shipped variant's exam, 0 for none.  "
    f"[{_EXAM}; 0 with --model]",
)
@click.option(
    "--quick", is_flag=True, help="A check of the bench in seconds; its figures mean little."
)
@record_option
@json_option
def vision(
    *,
    model: Path | None,
    engine: Path | None,
    device: Device,
    dtype: TargetType | None,
    cache: Path | None,
    exam: int | None,
    quick: bool,
    record: Record,
    as_json: bool,
) -> int:
    """Time pictures by stage through a daemon, beside transformers.

    JPEG files of three sizes; both answer the same question about each, in turns. What misses its
    aim is told.
    """
    if device == "cuda":
        gpu_facts()
    source = model or VISION
    if not (source / CONFIG_FILE).is_file():
        raise HearthError("engine_missing", f"there is no model at {source}", "model")
    precision: TargetType = dtype or ("float16" if device == "cuda" else "float32")
    folder = cache or cache_folder() / "bench"
    options = ExportOptions(backend="onnxruntime", device=device, dtype=precision)
    with progress_bar() as progress:
        stem = f"{source.name}-{device}-{precision}"
        made = engine or exported(source, folder, stem, options, progress)
    plan = VisionPlan(
        engine=made.resolve(),
        model=source.resolve(),
        logs=log_folder(folder),
        device=device,
        precision=precision,
        exam=(0 if model else _EXAM) if exam is None else exam,
    )
    if quick:
        plan = structs.replace(
            plan, rounds=1, kept=2, seconds=0.5, passes=1, pictures=1, tokens=8, row_rounds=1
        )
    figures = VisionSession(plan).measure()
    publish(figures, lambda: _print(figures), as_json=as_json)
    record.keep({device: figures})
    for aim in figures.missed:
        note(f"missed: {aim}")
    return 0


def _print(figures: VisionFigures) -> None:
    print_cases("Pictures, in milliseconds", _FIELDS, figures.sizes)
    parts = (figures.text_rows, figures.beside, figures.hidden)
    for title, part in zip(("A text row", "Text beside pictures", "Hidden"), parts, strict=True):
        if part is not None:
            print_fields(title, part)
    memory = {f"{name}_mb": value for name, value in figures.memory_mb.items()}
    for name, value in {"cached_ms": figures.cached_ms, **memory}.items():
        note(f"{name}: {value:.4g}")
