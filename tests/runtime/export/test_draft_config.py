from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.export.draft_config import (
    DraftConfig,
    DraftOptions,
    check_draft_options,
    default_taps,
    load_draft_config,
    read_taps,
    resolve_drafting,
    resolve_taps,
    resolve_tree,
)
from hearth.runtime.export.json_file import Fields
from hearth.runtime.export.model_config import load_model_config
from tests.eagle_models import write_draft
from tests.references import reference_folder
from tests.vision_models import Family, write_vision_model

BASE = load_model_config(reference_folder("llama"))


def load(folder: Path, **fields: Any) -> DraftConfig:
    write_draft(reference_folder("llama"), folder / "draft", **fields)
    return load_draft_config(folder / "draft", BASE)


def test_the_sizes_are_read(tmp_path: Path) -> None:
    draft = load(tmp_path, form="direct", vocabulary=60, bos_token_id=7)
    assert (draft.vocab_size, draft.taps) == (60, None)
    assert (draft.model.num_layers, draft.model.hidden_size) == (1, BASE.hidden_size)
    assert draft.model.eos_token_ids == BASE.eos_token_ids
    assert draft.model.bos_token_id == BASE.bos_token_id


def test_without_a_size_the_vocabulary_is_the_base_models(tmp_path: Path) -> None:
    assert load(tmp_path, draft_vocab_size=None).vocab_size == BASE.vocab_size


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("qwen3_vl", {"type": "default", "rope_type": "default", "mrope_interleaved": True}),
        ("qwen3_vl", {"rope_type": "default"}),
        ("qwen2_5_vl", {"type": "mrope"}),
    ],
)
def test_drafts_of_models_that_take_images_as_they_are_published(
    tmp_path: Path, family: Family, rope: dict[str, Any]
) -> None:
    base = write_vision_model(tmp_path / "base", family)
    draft = write_draft(
        base,
        tmp_path / "draft",
        form="offset",
        vocabulary=60,
        rope_scaling={**rope, "mrope_section": [4, 2, 2]},
        target_model_type=family,
        modal_type="VLM",
        image_token_id=5,
        video_token_id=6,
        vision_end_token_id=4,
        vision_start_token_id=3,
        tie_word_embeddings=True,
    )
    model = load_draft_config(draft, load_model_config(base)).model
    assert model.rope_per_row
    assert model.rope.mrope_interleaved == (family == "qwen3_vl")
    assert not model.tied_head
    assert (model.images, model.image_token_id, model.num_deepstack_features) == (None, 0, 0)


@pytest.mark.parametrize(
    ("fields", "taps"),
    [
        ({}, None),
        ({"target_layer_ids": [0, 1, 2]}, (1, 2, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0]}}, (2, 1)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, (0, 1, 2)),
        ({"eagle_config": None, "target_layer_ids": None}, None),
        (
            {
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]},
                "eagle_aux_hidden_state_layer_ids": [2],
            },
            (2,),
        ),
    ],
    ids=str,
)
def test_taps_in_every_spelling(fields: dict[str, Any], taps: tuple[int, ...] | None) -> None:
    assert read_taps(Fields(fields, "config.json")) == taps


@pytest.mark.parametrize("value", ["2", [], [1.0], [True], [None]], ids=str)
def test_taps_must_be_numbers(value: Any) -> None:
    with pytest.raises(HearthError) as caught:
        read_taps(Fields({"target_layer_ids": value}, "config.json"))
    assert (caught.value.code, caught.value.field) == ("model_invalid", "target_layer_ids")


def test_taps_are_those_asked_for_else_the_drafts_else_the_published(tmp_path: Path) -> None:
    silent = load(tmp_path)
    base = structs.replace(BASE, num_layers=12)
    assert resolve_taps((), silent, base) == default_taps(12) == (2, 6, 9)
    speaking = structs.replace(silent, taps=(1, 4, 12))
    assert resolve_taps((), speaking, base) == (1, 4, 12)
    assert resolve_taps((0, 3, 5), speaking, base) == (0, 3, 5)


@pytest.mark.parametrize("taps", [(1, 1, 2), (0, 1, 4), (-1, 0, 1)])
def test_taps_outside_the_model_are_refused(tmp_path: Path, taps: tuple[int, ...]) -> None:
    with pytest.raises(HearthError, match="from 0 to 3") as caught:
        resolve_taps(taps, load(tmp_path), BASE)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "eagle_layers")


def test_published_taps_that_a_small_model_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HearthError, match="layers 2, 2, 1"):
        resolve_taps((), load(tmp_path), structs.replace(BASE, num_layers=4))


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"architectures": ["EagleForCausalLM"]}, "model_unsupported", "architectures"),
        ({"num_hidden_layers": 2}, "model_unsupported", "num_hidden_layers"),
        ({"tie_word_embeddings": True}, "model_unsupported", "tie_word_embeddings"),
        ({"norm_before_residual": True}, "model_unsupported", "norm_before_residual"),
        ({"hidden_act": "gelu"}, "model_unsupported", "hidden_act"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "model_unsupported",
            "use_aux_hidden_state",
        ),
        ({"hidden_size": 64}, "model_invalid", "hidden_size"),
        ({"target_hidden_size": 64}, "model_invalid", "target_hidden_size"),
        ({"num_target_layers": 4}, "model_invalid", "num_target_layers"),
        ({"vocab_size": 300}, "model_invalid", "vocab_size"),
        ({"draft_vocab_size": 289}, "model_invalid", "draft_vocab_size"),
        ({"rms_norm_eps": 0}, "model_invalid", "rms_norm_eps"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], code: str, field: str
) -> None:
    with pytest.raises(HearthError) as caught:
        load(tmp_path, **fields)
    assert (caught.value.code, caught.value.field) == (code, field)


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
