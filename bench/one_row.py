"""Kinds of engine, and options about them, of the benches that run one row."""

import sys
from pathlib import Path
from typing import Literal

import click

from hearth.daemon.gpu_facts import gpu_facts
from hearth.runtime.export import ExportOptions
from hearth.runtime.export.options import PlanOptions
from hearth.runtime.files import cache_folder

Kind = Literal["fp32", "int8", "int4", "kernels", "ort-cuda", "tensorrt"]
_ON_CPU: tuple[Kind, ...] = ("fp32", "int8", "int4")
_ON_GPU: tuple[Kind, ...] = ("kernels", "ort-cuda", "tensorrt")

device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True
)
kind_option = click.option(
    "--kind",
    type=click.Choice([*_ON_CPU, *_ON_GPU]),
    help="What the model is exported as.  [fp32; kernels on a GPU]",
)
threads_option = click.option(
    "--threads", type=click.IntRange(0, 1024), default=0, help="0 for all cores.  [0]"
)
cache_option = click.option(
    "--cache",
    type=click.Path(path_type=Path),
    metavar="DIR",
    default=lambda: cache_folder() / "bench",
    help="Where models are kept between runs (about 8 GB).  [$HEARTH_CACHE/bench]",
)
builder_option = click.option(
    "--builder-python",
    metavar="FILE",
    help="The interpreter that has TensorRT's builder.  [this one]",
)
quick_option = click.option(
    "--quick",
    is_flag=True,
    help="A toy in place of the model: a check of the bench, its figures mean nothing.",
)


def choose_kind(device: str, kind: Kind | None, threads: int, builder_python: str | None) -> Kind:
    """The kind that is asked for, or the device's first; refuses what does not go with it."""
    kinds = _ON_CPU if device == "cpu" else _ON_GPU
    chosen = kind or kinds[0]
    if chosen not in kinds:
        raise click.BadParameter(f"{chosen} is no kind on {device}", param_hint="--kind")
    if builder_python and chosen != "tensorrt":
        raise click.UsageError("--builder-python is for --kind tensorrt")
    if device == "cuda":
        if threads:
            raise click.UsageError("--threads is for the CPU alone")
        gpu_facts()
    return chosen


def export_options(kind: Kind, builder_python: str | None, capacity: int) -> ExportOptions:
    """An engine of this kind for one row of so many tokens."""
    if kind == "kernels" or kind == "ort-cuda":  # noqa: PLR1714 - narrows the type
        return ExportOptions(
            backend="kernels" if kind == "kernels" else "onnxruntime",
            device="cuda",
            dtype="float16",
            capacity=capacity,
            max_batch=1,
        )
    if kind == "tensorrt":
        python = builder_python or sys.executable
        plan = PlanOptions(python=python, version_compatible=True, decode_batches=(1,))
        return ExportOptions(dtype="float16", capacity=capacity, max_batch=1, plan=plan)
    quantization = "none" if kind == "fp32" else kind
    return ExportOptions(quantization=quantization, capacity=capacity, max_batch=1)
