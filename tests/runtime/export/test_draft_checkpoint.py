from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from hearth.runtime.errors import HearthError
from hearth.runtime.export.checkpoint import SINGLE_FILE
from hearth.runtime.export.draft_config import (
    check_draft_tensors,
    load_draft_config,
    open_draft,
    read_full_ids,
)
from hearth.runtime.export.model_config import load_model_config
from tests.eagle_models import Form, write_draft
from tests.references import reference_folder
from tests.runtime.export.hugging_face import Tensors, change_tensors

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
