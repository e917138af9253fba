"""An option of a token tree has one name: of its flag, its setting, its field and its refusal."""

import re
from pathlib import Path
from typing import Any

import click
import pytest
from msgspec import structs

from hearth.daemon.cli.export import export
from hearth.daemon.cli.serve import serve
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.export.draft_config import DraftOptions, check_draft_options, resolve_tree
from hearth.runtime.generation.deployment import resolve_deployment
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from tests.runtime.engine_configs import draft_config, small_config

BASE = structs.replace(
    small_config(), enable_eagle_spec_decode=True, output_hidden_dim=48, max_verify_tree_size=20
)
DRAFT = structs.replace(draft_config(small_config()), max_draft_tree_size=12)
CHAINS = structs.replace(DRAFT, chains_only=True)
STATIC: dict[str, Any] = {"backend": "tensorrt", "device": "cuda", "static_decode_batches": (1, 4)}
PLAN = structs.replace(BASE, **STATIC)
PLAN_DRAFT = structs.replace(DRAFT, **STATIC, static_drafting=(2, 5))
TREE = EagleDraftingConfig(drafting_top_k=2, drafting_step=5, verify_tree_size=20)


def flags(command: click.Command) -> dict[str, str]:
    """The command's flags by the names of their values."""
    return {str(one.name): one.opts[0] for one in command.params if isinstance(one, click.Option)}


def check_names(error: HearthError, command: click.Command) -> None:
    """What the error is about, and all that it speaks of, can be given to the command."""
    known = flags(command)
    assert error.field is not None
    assert known[error.field] == "--" + error.field.replace("_", "-")
    assert set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", error.message)) <= known.keys()


def test_options_are_called_like_their_flags() -> None:
    assert set(EagleDraftingConfig.__struct_fields__) <= flags(serve).keys()
    assert set(DraftOptions.__struct_fields__) - {"folder"} <= flags(export).keys()


@pytest.mark.parametrize(
    ("base", "draft", "wrong"),
    [
        (BASE, DRAFT, {"drafting_top_k": 0}),
        (BASE, DRAFT, {"drafting_step": 0}),
        (BASE, DRAFT, {"drafting_step": 31}),
        (BASE, DRAFT, {"verify_tree_size": 1}),
        (BASE, DRAFT, {"verify_tree_size": 129}),
        (BASE, DRAFT, {"drafting_top_k": 4, "verify_tree_size": 128}),
        (BASE, DRAFT, {"drafting_top_k": 3}),
        (BASE, CHAINS, {}),
        (PLAN, PLAN_DRAFT, {"drafting_top_k": 1, "verify_tree_size": 5}),
        (PLAN, PLAN_DRAFT, {"drafting_step": 4}),
        (PLAN, PLAN_DRAFT, {"verify_tree_size": 19}),
        (BASE, None, {}),
    ],
)
def test_a_refusal_names_what_serving_takes(
    base: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig | None, wrong: dict[str, int]
) -> None:
    tree = structs.replace(TREE, **wrong)
    speculation = SpeculationOptions(method="lookup" if draft is None else "eagle", eagle=tree)
    with pytest.raises(HearthError) as caught:
        resolve_deployment(base, draft, RuntimeOptions(speculation=speculation))
    check_names(caught.value, serve)
    assert caught.value.field in {*wrong, "draft_tree"}


@pytest.mark.parametrize("tokens", [-1, 31, 20])
def test_a_refused_lookup_names_what_serving_takes(tokens: int) -> None:
    speculation = SpeculationOptions(method="lookup", lookup_tokens=tokens)
    with pytest.raises(HearthError) as caught:
        resolve_deployment(BASE, DRAFT, RuntimeOptions(speculation=speculation))
    assert caught.value.field == "lookup_tokens"
    check_names(caught.value, serve)


@pytest.mark.parametrize(
    ("name", "value", "static"),
    [
        ("max_verify_tree_size", 1, False),
        ("max_verify_tree_size", 129, True),
        ("max_draft_tree_size", -1, False),
        ("max_draft_tree_size", 4, True),
        ("drafting_top_k", -1, True),
        ("drafting_top_k", 4, False),
        ("drafting_step", 4, False),
        ("drafting_step", 31, True),
        ("verify", "chains", True),
    ],
)
def test_a_refusal_names_what_export_takes(name: str, value: object, *, static: bool) -> None:
    options = structs.replace(DraftOptions(folder=Path("draft")), **{name: value})
    with pytest.raises(HearthError) as caught:
        check_draft_options(options, static=static)
    assert caught.value.field == name
    check_names(caught.value, export)


def test_a_tree_that_no_row_holds_is_named() -> None:
    for name in ("max_verify_tree_size", "max_draft_tree_size"):
        with pytest.raises(HearthError) as caught:
            resolve_tree(name, 41, 40)
        check_names(caught.value, export)
