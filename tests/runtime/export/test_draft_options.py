from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.export.draft_config import (
    DraftOptions,
    check_draft_options,
    resolve_drafting,
    resolve_tree,
)

PLAIN = DraftOptions(folder=Path("draft"))


def fault(*, static: bool, **options: Any) -> HearthError:
    with pytest.raises(HearthError) as caught:
        check_draft_options(structs.replace(PLAIN, **options), static=static)
    return caught.value


@pytest.mark.parametrize("static", [True, False])
def test_the_defaults_pass(*, static: bool) -> None:
    check_draft_options(PLAIN, static=static)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_verify_tree_size", 1),
        ("max_verify_tree_size", 129),
        ("max_draft_tree_size", -1),
        ("drafting_top_k", -1),
        ("drafting_step", -1),
        ("verify", "stars"),
    ],
)
def test_an_option_without_meaning_is_named(name: str, value: object) -> None:
    for static in (True, False):
        error = fault(static=static, **{name: value})
        assert (error.code, error.field) == ("invalid_value", name)


@pytest.mark.parametrize(
    ("static", "name", "value"),
    [
        (False, "drafting_top_k", 4),
        (False, "drafting_step", 4),
        (True, "max_draft_tree_size", 4),
        (True, "verify", "chains"),
    ],
)
def test_an_option_of_the_other_backend_is_refused(
    name: str, value: object, *, static: bool
) -> None:
    error = fault(static=static, **{name: value})
    assert (error.code, error.field) == ("unsupported_option", name)


def test_the_tokens_of_a_round_fit_into_one_word() -> None:
    check_draft_options(structs.replace(PLAIN, drafting_step=30), static=True)
    assert fault(static=True, drafting_step=31).field == "drafting_step"


@pytest.mark.parametrize(
    ("asked", "capacity", "size"), [(0, 512, 60), (0, 40, 40), (16, 40, 16), (40, 40, 40)]
)
def test_a_tree_is_what_was_asked_for_or_fits(asked: int, capacity: int, size: int) -> None:
    assert resolve_tree("max_verify_tree_size", asked, capacity) == size


def test_a_tree_larger_than_a_row_is_refused() -> None:
    with pytest.raises(HearthError, match="at most the capacity, 40") as caught:
        resolve_tree("max_draft_tree_size", 41, 40)
    assert caught.value.field == "max_draft_tree_size"


def test_a_plan_proposes_the_default_tree_unless_told() -> None:
    assert resolve_drafting(PLAIN) == (10, 6)
    assert resolve_drafting(structs.replace(PLAIN, drafting_top_k=4)) == (4, 6)
    assert resolve_drafting(structs.replace(PLAIN, drafting_step=3)) == (10, 3)
