"""The options of `hearth export` that only a draft engine has."""

from pathlib import Path
from typing import Any

import click

from daemon.cli.options import refuse_without, with_options
from daemon.shipped_files import shipped_model


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them; raises BadParameter for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers like 1,2,3") from None


_OPTIONS: dict[str, tuple[Any, str]] = {
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
draft_options = with_options(_OPTIONS)
"""Adds the options to a command."""


def take_draft(options: dict[str, Any]) -> Any:
    """Remove the draft's options from `options`; the `DraftOptions`, or None without a draft.

    Raises `click.UsageError` naming an option that was given without a draft.
    """
    from runtime.export import DraftOptions  # noqa: PLC0415 - slow import

    given = {name: value for name in _OPTIONS if (value := options.pop(name)) is not None}
    folder = given.pop("draft", None)
    if folder is None:
        refuse_without("--draft", given)
        return None
    return DraftOptions(folder=shipped_model(folder), **given)
