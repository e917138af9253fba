"""Draft engines: their checkpoints, and the graph against the forward pass in NumPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

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
from hearth.runtime.export.draft_config import (
    check_draft_tensors,
    load_draft_config,
    open_draft,
    read_full_ids,
)
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.memory.sizes import projection_bytes
from tests.eagle_models import Form, write_draft
from tests.references import NAMES, reference_folder
from tests.runtime.conftest import EngineFolders
from tests.runtime.export.drafts import compare_draft
from tests.runtime.export.hugging_face import Tensors, change_tensors
from tests.runtime.export.trees import export_with_draft
from tests.vision_models import write_vision_model

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


BASE = load_model_config(reference_folder("llama"))
OWN = 60


def draft_folder(folder: Path, form: Form = "offset") -> Path:
    return write_draft(reference_folder("llama"), folder / "draft", form=form, vocabulary=OWN)


def full_ids(folder: Path) -> NDArray[np.int32] | None:
    return read_full_ids(open_draft(folder), load_draft_config(folder, BASE))


def check(folder: Path) -> None:
    check_draft_tensors(open_draft(folder), load_draft_config(folder, BASE), 3 * BASE.hidden_size)


def marked(folder: Path) -> NDArray[Any]:
    return np.flatnonzero(load_file(folder / SINGLE_FILE)["t2d"])


def renamed(folder: Path, rename: Callable[[str], str]) -> Path:
    tensors = load_file(folder / SINGLE_FILE)
    save_file({rename(name): value for name, value in tensors.items()}, folder / SINGLE_FILE)
    return folder


@pytest.mark.parametrize("form", ["offset", "direct"])
@pytest.mark.parametrize("with_marks", [True, False])
def test_the_form_of_the_vocabulary_is_found(
    tmp_path: Path, form: Form, *, with_marks: bool
) -> None:
    folder = draft_folder(tmp_path, form)
    expected = marked(folder)
    if not with_marks:
        change_tensors(folder, lambda tensors: tensors.pop("t2d"))
    ids = full_ids(folder)
    assert ids is not None
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, expected)


def test_marks_decide_where_both_forms_would_do(tmp_path: Path) -> None:
    folder = draft_folder(tmp_path)
    ids = np.arange(OWN) * 3

    def spread(tensors: Tensors) -> None:
        tensors["d2t"] = ids - np.arange(OWN)
        tensors["t2d"] = np.isin(np.arange(BASE.vocab_size), ids)

    change_tensors(folder, spread)
    np.testing.assert_array_equal(full_ids(folder), ids)


def test_a_shuffled_direct_vocabulary_is_read(tmp_path: Path) -> None:
    folder = draft_folder(tmp_path, "direct")
    change_tensors(folder, lambda tensors: tensors.update(d2t=tensors["d2t"][::-1].copy()))
    np.testing.assert_array_equal(full_ids(folder), marked(folder)[::-1])


def test_the_base_models_vocabulary_needs_no_file(tmp_path: Path) -> None:
    folder = draft_folder(tmp_path, "none")
    assert full_ids(folder) is None
    change_tensors(folder, lambda t: t.update(d2t=np.zeros(BASE.vocab_size, np.int64)))
    assert full_ids(folder) is None


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "d2t"),
        (np.zeros(OWN - 1, np.int64), "d2t"),
        (np.zeros(OWN, np.float32), "d2t"),
        (np.full(OWN, BASE.vocab_size, np.int64), "d2t"),
        (np.full(OWN, -OWN, np.int64), "d2t"),
        (np.zeros(OWN, np.int64), "d2t"),  # not what t2d marks
    ],
    ids=str,
)
def test_a_vocabulary_without_meaning_is_refused(tmp_path: Path, value: Any, name: str) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["d2t"]
        if value is not None:
            tensors["d2t"] = value

    folder = draft_folder(tmp_path)
    change_tensors(folder, change)
    with pytest.raises(HearthError) as caught:
        full_ids(folder)
    assert (caught.value.code, caught.value.field) == ("model_invalid", name)


def test_marks_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = draft_folder(tmp_path)
    change_tensors(folder, lambda tensors: tensors.update(t2d=np.ones(5, np.bool_)))
    with pytest.raises(HearthError) as caught:
        full_ids(folder)
    assert caught.value.field == "t2d"


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: f"model.{name}",
        lambda name: name.replace("midlayer.", "layers.0."),
        lambda name: f"model.{name.replace('midlayer.', 'layers.0.')}",
    ],
    ids=["midlayer", "model.midlayer", "layers.0", "model.layers.0"],
)
def test_every_published_name_is_known(tmp_path: Path, rename: Callable[[str], str]) -> None:
    folder = renamed(draft_folder(tmp_path), rename)
    check(folder)
    assert full_ids(folder) is not None


def test_what_is_not_needed_may_be_there(tmp_path: Path) -> None:
    folder = draft_folder(tmp_path)
    more = {
        "embed_tokens.weight": np.zeros((BASE.vocab_size, BASE.hidden_size), np.float32),
        "midlayer.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    change_tensors(folder, lambda tensors: tensors.update(more))
    check(folder)


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [
        (lambda t: t.pop("fc.weight"), "model_invalid", "fc.weight"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, :64]}), "model_invalid", "fc.weight"),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1]}),
            "model_invalid",
            "lm_head.weight",
        ),
        (lambda t: t.update(surprise=np.zeros(1, np.float32)), "model_unsupported", "surprise"),
        (
            lambda t: t.update({"model.norm.weight": t["norm.weight"]}),
            "model_invalid",
            "norm.weight",
        ),
    ],
    ids=["missing", "other taps", "other vocabulary", "unknown", "twice"],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[Tensors], object], code: str, name: str
) -> None:
    folder = draft_folder(tmp_path)
    change_tensors(folder, change)
    with pytest.raises(HearthError) as caught:
        check(folder)
    assert (caught.value.code, caught.value.field) == (code, name)


@pytest.mark.parametrize("name", NAMES)
def test_committed_tokens_and_a_tree_agree(
    tree_folders: EngineFolders, name: str, dialect: str
) -> None:
    compare_draft(tree_folders(name, dialect), reference_folder(name), 1e-4)


def test_float16_is_close(tmp_path: Path, dialect: str) -> None:
    folder = export_with_draft("llama", tmp_path, dialect=dialect, dtype="float16")
    compare_draft(folder, reference_folder("llama"), 0.05)


def test_a_draft_of_a_model_that_takes_images_has_tables_of_every_row(
    tmp_path: Path, dialect: str
) -> None:
    base = write_vision_model(tmp_path / "m", "qwen3_vl")
    folder = export_with_draft(base, tmp_path, dialect=dialect)
    config = load_config(folder / DRAFT_FOLDER)
    assert config.use_context_dependent_rope
    assert config.rope_config.mrope_interleaved
    assert (config.num_deepstack_features, config.image_token_id) == (0, 5)
    compare_draft(folder, base, 1e-4)


def test_a_draft_may_count_images_as_text(tmp_path: Path) -> None:
    base = write_vision_model(tmp_path / "m", "qwen3_vl")
    draft = write_draft(base, tmp_path / "draft", rope_scaling=None)
    export_model(base, tmp_path / "e", ExportOptions(draft=DraftOptions(folder=draft)))
    config = load_config(tmp_path / "e" / DRAFT_FOLDER)
    assert (config.rope_config.type, config.use_context_dependent_rope) == ("default", False)
