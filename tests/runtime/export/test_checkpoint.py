import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime.errors import HearthError
from runtime.export.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from runtime.export.layout import check_tensors
from runtime.export.model_config import load_model_config
from tests.references import reference_folder
from tests.runtime.export.hugging_face import Tensors, change_tensors, copy_model

SHARD = "model-00002-of-00003.safetensors"
NORM = "model.norm.weight"


def fault(folder: Path) -> tuple[str, str | None]:
    with pytest.raises(HearthError) as caught:
        check_tensors(Checkpoint(folder), load_model_config(folder))
    return caught.value.code, caught.value.field


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_pieces_of_every_source_type(tmp_path: Path, dtype: Any) -> None:
    matrix = np.arange(24).reshape(6, 4).astype(dtype)
    save_file({"m": matrix, "v": matrix[0].copy()}, tmp_path / SINGLE_FILE)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.dtype("m") == dtype
    np.testing.assert_array_equal(checkpoint.rows("m", 2, 5), matrix[2:5])
    np.testing.assert_array_equal(checkpoint.columns("m", 1, 3), matrix[:, 1:3])
    np.testing.assert_array_equal(checkpoint.vector("v"), matrix[0])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_untied", "qwen2", "llama"])
def test_a_whole_model_passes(name: str) -> None:
    folder = reference_folder(name)
    check_tensors(Checkpoint(folder), load_model_config(folder))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m")
    data = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(data[:-10])
    assert fault(folder) == ("model_invalid", SINGLE_FILE)


@pytest.mark.parametrize("keep", [0, 4, 100])
def test_a_truncated_shard_is_named(tmp_path: Path, keep: int) -> None:
    folder = copy_model("qwen3_untied", tmp_path / "m")
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:keep])
    assert fault(folder) == ("model_invalid", SHARD)


@pytest.mark.parametrize(("name", "file"), [("qwen3_untied", SHARD), ("llama", SINGLE_FILE)])
def test_a_missing_file_is_named(tmp_path: Path, name: str, file: str) -> None:
    folder = copy_model(name, tmp_path / "m")
    (folder / file).unlink()
    assert fault(folder) == ("model_invalid", file)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m")
    change_tensors(folder, lambda tensors: tensors.__delitem__(NORM))
    assert fault(folder) == ("model_invalid", NORM)


def test_a_tensor_that_the_index_promises_and_its_shard_lacks_is_named(tmp_path: Path) -> None:
    folder = copy_model("qwen3_untied", tmp_path / "m")
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"]["model.extra.weight"] = SHARD
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert fault(folder) == ("model_invalid", "model.extra.weight")


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "..", 7, ["a"]])
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, place: Any) -> None:
    folder = copy_model("qwen3_untied", tmp_path / "m")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {NORM: place}}))
    assert fault(folder) == ("model_invalid", INDEX_FILE)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_an_index_without_tensors_is_refused(tmp_path: Path, index: Any) -> None:
    folder = copy_model("qwen3_untied", tmp_path / "m")
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert fault(folder) == ("model_invalid", INDEX_FILE)


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
