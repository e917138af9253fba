from pathlib import Path

import pytest
from msgspec import structs

from hearth.daemon.configuration.load import OLD_NAMES, load_settings
from hearth.daemon.configuration.settings import settings_of
from hearth.runtime.errors import HearthError
from hearth.runtime.options import EagleDraftingConfig, check_speculation

WHOLE = {"drafting_top_k": "4", "drafting_step": "3", "verify_tree_size": "16"}
TREE = EagleDraftingConfig(drafting_top_k=4, drafting_step=3, verify_tree_size=16)


def refusal(**flags: str) -> HearthError:
    with pytest.raises(HearthError) as caught:
        load_settings(environ={}, flags=flags)
    assert caught.value.code == "invalid_value"
    return caught.value


def test_a_tree_is_one_setting() -> None:
    settings = load_settings(environ={"HEARTH_DRAFT_TREE": "4x3/16"})
    assert settings == settings_of(draft_tree=TREE)
    assert settings.runtime.speculation.eagle == TREE
    assert load_settings(environ={}, flags={"draft_tree": ""}) == settings_of()


@pytest.mark.parametrize(
    "text", ["4x3", "4x3/", "4/3x16", "4x3/16 ", "-4x3/16", "0x3/16", "4x31/16", "4x3/129", "auto"]
)
def test_what_is_no_tree_is_refused_with_one_that_is(text: str) -> None:
    error = refusal(draft_tree=text)
    assert error.field == "draft_tree"
    assert "--draft-tree" in error.message
    assert "such as 10x6/60" in error.message


def test_a_number_of_the_file_is_no_tree(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text("draft_tree = 4")
    with pytest.raises(HearthError, match="draft_tree: 4 is not allowed"):
        load_settings(path, {})


def test_its_sizes_are_taken_with_a_warning_that_has_the_new_name(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text("drafting_top_k = 4\ndrafting_step = 9")
    environ = {"HEARTH_DRAFTING_STEP": "3"}
    settings = load_settings(path, environ, {"verify_tree_size": "16"})
    assert structs.replace(settings, warnings=()) == settings_of(draft_tree=TREE)
    (warning,) = settings.warnings
    assert warning.endswith('give draft_tree = "4x3/16"')


def test_sizes_of_zero_are_as_if_they_were_not_given() -> None:
    settings = load_settings(environ={}, flags=dict.fromkeys(OLD_NAMES, "0"))
    assert settings.runtime.speculation.eagle is None
    assert settings.warnings


@pytest.mark.parametrize("missing", OLD_NAMES)
def test_a_tree_that_is_given_in_part_is_refused(missing: str) -> None:
    error = refusal(**{**WHOLE, missing: "0"})
    assert "together" in error.message
    assert error.field == missing


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_name_beside_the_new_one_is_refused_where_it_stands(name: str) -> None:
    error = refusal(**{name: "4", "draft_tree": "4x3/16"})
    assert error.message.startswith("--" + name.replace("_", "-"))
    assert error.field == name


@pytest.mark.parametrize(("name", "most"), [("drafting_top_k", 128), ("drafting_step", 30)])
def test_the_largest_of_each_size_is_an_option(name: str, most: int) -> None:
    assert "from 0 to" in refusal(**{**WHOLE, name: str(most + 1)}).message
    settings = load_settings(environ={}, flags={**WHOLE, name: str(most)})
    check_speculation(settings.runtime.speculation)
