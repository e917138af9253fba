from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.layout import (
    EMBEDDING,
    HEAD,
    check_tensors,
    expected_tensors,
    settle_head,
)
from hearth.runtime.export.model_config import load_model_config
from tests.references import NAMES, reference_folder
from tests.runtime.export.hugging_face import Tensors, change_tensors, copy_model

NORM = "model.norm.weight"


def fault(folder: Path) -> tuple[str, str | None]:
    with pytest.raises(HearthError) as caught:
        check_tensors(Checkpoint(folder), load_model_config(folder))
    return caught.value.code, caught.value.field


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_model_passes_and_nothing_of_it_is_left_over(name: str) -> None:
    model, checkpoint = (
        load_model_config(reference_folder(name)),
        Checkpoint(reference_folder(name)),
    )
    check_tensors(checkpoint, model)
    assert {tensor for tensor, _ in expected_tensors(model)} == set(checkpoint.names)


def test_a_tensor_of_another_type_is_named(tmp_path: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        tensors[NORM] = tensors[NORM].astype(np.int8)

    folder = copy_model("llama", tmp_path / "m")
    change_tensors(folder, narrow)
    assert fault(folder) == ("model_invalid", NORM)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m", intermediate_size=65)
    assert fault(folder) == ("model_invalid", "model.layers.0.mlp.gate_proj.weight")


def test_layers_beyond_those_stored_are_refused_at_the_first(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m", num_hidden_layers=10**12)
    assert fault(folder) == ("model_invalid", "model.layers.3.input_layernorm.weight")


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.input_layernorm.weight"]
)
def test_a_tensor_that_nothing_would_read_is_refused(tmp_path: Path, name: str) -> None:
    def add(tensors: Tensors) -> None:
        tensors[name] = np.zeros(4, np.float32)

    folder = copy_model("llama", tmp_path / "m")
    change_tensors(folder, add)
    assert fault(folder) == ("model_unsupported", name)


def test_derived_tensors_and_the_copy_of_a_tied_head_are_ignored(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        tensors["model.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    folder = copy_model("qwen3", tmp_path / "m")
    change_tensors(folder, add)
    check_tensors(Checkpoint(folder), load_model_config(folder))


@pytest.mark.parametrize(("factor", "tied"), [(1, True), (-1, False)])
def test_a_head_beside_a_tied_table_is_a_copy_or_its_own(
    tmp_path: Path, factor: int, *, tied: bool
) -> None:
    folder = copy_model("llama_linear", tmp_path / "m")
    change_tensors(folder, lambda one: one.update({HEAD: one[EMBEDDING].astype("f4") * factor}))
    checkpoint = Checkpoint(folder)
    model = settle_head(checkpoint, load_model_config(folder))
    assert model.tied_head == tied
    check_tensors(checkpoint, model)


@pytest.mark.parametrize(
    "head", [np.zeros((4, 32), np.float32), np.zeros((288, 32), np.int8)], ids=str
)
def test_a_head_beside_a_tied_table_that_does_not_fit_is_named(tmp_path: Path, head: Any) -> None:
    folder = copy_model("llama_linear", tmp_path / "m")
    change_tensors(folder, lambda one: one.update({HEAD: head}))
    with pytest.raises(HearthError) as caught:
        settle_head(Checkpoint(folder), load_model_config(folder))
    assert (caught.value.code, caught.value.field) == ("model_invalid", HEAD)
