import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hearth.runtime.errors import HearthError
from hearth.runtime.export.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from hearth.runtime.export.layout import check_tensors
from hearth.runtime.export.model_config import load_model_config
from tests.runtime.export.hugging_face import change_tensors, copy_model

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
    whole = slice(None)
    np.testing.assert_array_equal(checkpoint.matrix("m", slice(2, 5), whole), matrix[2:5])
    np.testing.assert_array_equal(checkpoint.matrix("m", whole, slice(1, 3)), matrix[:, 1:3])
    assert checkpoint.shape("m")[0] == 6
    np.testing.assert_array_equal(checkpoint.vector("v"), matrix[0])


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_a_type_that_numpy_has_not_is_named(tmp_path: Path, dtype: str) -> None:
    entry = {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}
    header = json.dumps({"v": entry}).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(HearthError, match=dtype) as caught:
        Checkpoint(tmp_path).vector("v")
    assert (caught.value.code, caught.value.field) == ("model_invalid", "v")


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
