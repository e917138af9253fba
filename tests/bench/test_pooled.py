"""Models out of a pool look like those that are exported."""

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.bench import pooled
from hearth.bench.contenders.gguf_model import GGUFType, write_gguf
from hearth.bench.pooled import gguf_tensors, write_pooled_engine
from hearth.bench.random_model import QUICK_SHAPE, write_shape
from hearth.runtime.config import load_config
from hearth.runtime.engine_folder import verify_folder
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.weights.quantised import Quantised, unpack, widen
from hearth.runtime.weights.weights_file import load_layout

FLOAT = ExportOptions(backend="kernels", device="cuda", dtype="float16", capacity=64, max_batch=2)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shape") / "quick"
    write_shape(folder, QUICK_SHAPE)
    return folder


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_an_engine_has_the_form_of_an_exported_one(
    shape: Path, quick_model: Path, tmp_path: Path, quantization: str
) -> None:
    options = structs.replace(FLOAT, quantization=quantization)
    write_pooled_engine(shape, tmp_path / "pooled", options)
    exported = export_model(quick_model, tmp_path / "exported", options)
    config = load_config(tmp_path / "pooled")
    verify_folder(tmp_path / "pooled", config, digests=True)
    # Nobody asks it for text, and its numbers are not those of a checkpoint.
    beside: dict[str, Any] = {"files": {}, "template_tokens": {}, "drift": None}
    assert structs.replace(config, **beside) == structs.replace(exported, **beside)
    ours, theirs = load_layout(tmp_path / "pooled"), load_layout(tmp_path / "exported")
    assert structs.replace(ours, own="") == structs.replace(theirs, own="")


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_llama_cpp_s_file_has_every_tensor(shape: Path, tmp_path: Path, kind: GGUFType) -> None:
    gguf = pytest.importorskip("gguf")
    tensors = partial(gguf_tensors, load_model_config(shape), kind)
    write_gguf(shape, tmp_path / "model.gguf", kind, tensors=tensors)
    read = {one.name: one for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(read) == len(list(tensors()))
    up = read["blk.1.ffn_up.weight"]
    assert up.tensor_type.name == kind
    values = gguf.dequantize(up.data, up.tensor_type)
    assert values.shape == (QUICK_SHAPE.intermediate, QUICK_SHAPE.hidden)
    assert values.std() == pytest.approx(0.64 / QUICK_SHAPE.hidden**0.5, rel=0.05)


@pytest.mark.parametrize(
    ("quantization", "tolerance"), [("none", 0), ("int8", 0.01), ("int4", 0.2)]
)
def test_all_forms_hold_the_same_numbers(
    shape: Path, tmp_path: Path, quantization: Any, tolerance: float
) -> None:
    name, width = "layers.1.down", 0.64 / QUICK_SHAPE.intermediate**0.5
    folder = tmp_path / "engine"
    write_pooled_engine(shape, folder, structs.replace(FLOAT, quantization=quantization))
    config, layout = load_config(folder), load_layout(folder)
    data = np.fromfile(folder / "weights.safetensors", np.uint8)

    def tensor(key: str, dtype: Any) -> Any:
        entry = layout.tensors[key]
        return data[entry.offset : entry.offset + entry.nbytes].view(dtype).reshape(entry.shape)

    if quantization == "none":
        found = tensor(name, np.float16)
    else:
        integers = tensor(name, np.uint8)
        integers = unpack(integers) if quantization == "int4" else integers
        made = Quantised(quantization, integers, tensor(f"{name}.scale", np.float16))
        found = widen(made, np.dtype(np.float16))
    assert config.weight_quantization == quantization
    plain = pooled._rounded(width, np.dtype(np.float16))
    start = zlib.crc32(name.encode()) % (plain.size // 128) * 128
    expected = np.take(plain, np.arange(start, start + found.size), mode="wrap")
    np.testing.assert_allclose(
        found.reshape(-1).astype(np.float32), expected, atol=tolerance * width * 4
    )
