"""The options of `hearth export` that only a TensorRT plan has."""

import sys
from pathlib import Path
from typing import Any

import click

from daemon.cli.options import refuse_without, with_options
from runtime.cache_folder import cache_folder

_OPTIONS: dict[str, tuple[Any, str]] = {
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
plan_options = with_options(_OPTIONS)
"""Adds the options to a command."""


def take_plan(options: dict[str, Any]) -> Any:
    """Remove the plan's options from `options`; the `PlanOptions`, or None without a plan.

    Raises `click.UsageError` naming an option that was given without a plan.
    """
    from runtime.export.tensorrt.options import PlanOptions  # noqa: PLC0415 - slow import

    given = {name: options.pop(name) for name in _OPTIONS}
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
