from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import load_file

from hearth.runtime.config import BASE_CONFIG_FILE, CONFIG_FILE, DRAFT_CONFIG_FILE, load_config
from hearth.runtime.engine_folder import (
    ANSWER_FILE,
    DATA_FILE,
    DRAFT_FOLDER,
    MODEL_FILE,
    REQUIRED_FILES,
    ROPE_FILE,
    TEMPLATE_FILE,
    VOCABULARY_FILE,
    verify_folder,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.export.checkpoint import SINGLE_FILE
from hearth.runtime.memory.sizes import projection_bytes
from tests.eagle_models import Form, write_draft
from tests.references import reference_folder

QWEN3 = reference_folder("qwen3")


def draft_options(folder: Path, form: Form = "offset", **options: Any) -> DraftOptions:
    draft = write_draft(QWEN3, folder / "draft_model", form=form, vocabulary=60)
    return structs.replace(DraftOptions(folder=draft, eagle_layers=(1, 2, 3)), **options)


def test_both_folders_are_complete_and_pass_their_own_check(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    config = export_model(QWEN3, target, ExportOptions(draft=draft_options(tmp_path)))
    assert (target / BASE_CONFIG_FILE).is_file()
    assert not (target / CONFIG_FILE).exists()
    assert load_config(target) == config
    verify_folder(target, config, digests=True)
    assert set(config.files) == {*REQUIRED_FILES, TEMPLATE_FILE, ANSWER_FILE}
    draft = load_config(target / DRAFT_FOLDER)
    verify_folder(target / DRAFT_FOLDER, draft, digests=True)
    assert set(draft.files) == {MODEL_FILE, DATA_FILE, ROPE_FILE, VOCABULARY_FILE}
    assert (target / DRAFT_FOLDER / DRAFT_CONFIG_FILE).is_file()


def test_the_configurations_say_what_the_engines_take(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    options = draft_options(tmp_path, max_verify_tree_size=20, max_draft_tree_size=12)
    base = export_model(QWEN3, target, ExportOptions(draft=options, capacity=100, max_batch=3))
    draft = load_config(target / DRAFT_FOLDER)
    assert (base.enable_eagle_spec_decode, base.eagle_layers) == (True, (1, 2, 3))
    assert (base.output_hidden_dim, base.max_verify_tree_size) == (96, 20)
    assert (draft.architecture, draft.num_decoder_layers, draft.num_attention_layers) == (
        "eagle3", 1, 1,
    )  # fmt: skip
    assert (draft.base_hidden_dim, draft.max_draft_tree_size) == (96, 12)
    assert (draft.vocab_size, draft.output_vocab_size) == (base.vocab_size, 60)
    for name in ("dtype", "dialect", "max_kv_cache_capacity", "max_supported_batch_size"):
        assert getattr(draft, name) == getattr(base, name)


@pytest.mark.parametrize(("capacity", "size"), [(0, 60), (40, 40)])
def test_the_largest_trees_are_sixty_where_they_fit(
    tmp_path: Path, capacity: int, size: int
) -> None:
    target = tmp_path / "engine"
    options = ExportOptions(draft=draft_options(tmp_path), capacity=capacity)
    base = export_model(QWEN3, target, options)
    assert base.max_verify_tree_size == size
    assert load_config(target / DRAFT_FOLDER).max_draft_tree_size == size


@pytest.mark.parametrize("form", ["offset", "direct", "none"])
def test_the_vocabulary_is_written_where_the_draft_has_one(tmp_path: Path, form: Form) -> None:
    options = draft_options(tmp_path, form)
    export_model(QWEN3, tmp_path / "engine", ExportOptions(draft=options))
    path = tmp_path / "engine" / DRAFT_FOLDER / VOCABULARY_FILE
    assert path.exists() == (form != "none")
    if form != "none":
        ids = load_file(path)["full_ids"]
        assert ids.dtype == np.int32
        marks = load_file(options.folder / SINGLE_FILE)["t2d"]
        np.testing.assert_array_equal(ids, np.flatnonzero(marks))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_sizes_of_the_weights_are_foretold(tmp_path: Path, quantization: str) -> None:
    options = structs.replace(
        ExportOptions(draft=draft_options(tmp_path)), quantization=quantization
    )
    export_model(QWEN3, tmp_path / "engine", options)
    draft = load_config(tmp_path / "engine" / DRAFT_FOLDER)
    assert draft.weight_quantization == quantization
    foretold, stored = projection_bytes(draft), draft.files[DATA_FILE].bytes
    assert foretold <= stored <= foretold + 32 * 4096  # every tensor begins at a page


def test_the_same_models_give_the_same_bytes(tmp_path: Path) -> None:
    options = ExportOptions(draft=draft_options(tmp_path))
    first, second = (export_model(QWEN3, tmp_path / name, options) for name in "ab")
    assert first == second
    assert load_config(tmp_path / "a/draft") == load_config(tmp_path / "b/draft")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"eagle_layers": (0, 0, 1)}, "eagle_layers"),
        ({"eagle_layers": (0, 1)}, "fc.weight"),
        ({"max_verify_tree_size": 1}, "max_verify_tree_size"),
        ({"max_verify_tree_size": 129}, "max_verify_tree_size"),
        ({"max_verify_tree_size": 65}, "max_verify_tree_size"),
        ({"max_draft_tree_size": -1}, "max_draft_tree_size"),
        ({"max_draft_tree_size": 65}, "max_draft_tree_size"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    chosen = ExportOptions(draft=draft_options(tmp_path, **options), capacity=64)
    with pytest.raises(HearthError) as caught:
        export_model(QWEN3, tmp_path / "out" / "engine", chosen)
    assert caught.value.field == field
    assert not (tmp_path / "out").exists()


def test_a_draft_of_another_model_is_refused(tmp_path: Path) -> None:
    options = draft_options(tmp_path)
    other = reference_folder("qwen3_untied")
    export_model(other, tmp_path / "fits", ExportOptions(draft=options))
    wider = write_draft(QWEN3, tmp_path / "wider", hidden_size=64)
    with pytest.raises(HearthError) as caught:
        export_model(
            QWEN3, tmp_path / "engine", ExportOptions(draft=structs.replace(options, folder=wider))
        )
    assert caught.value.field == "hidden_size"


def test_a_draft_that_is_not_there_is_named(tmp_path: Path) -> None:
    options = ExportOptions(draft=DraftOptions(folder=tmp_path / "none"))
    with pytest.raises(HearthError) as caught:
        export_model(QWEN3, tmp_path / "engine", options)
    assert caught.value.code == "model_invalid"
