import json
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from hearth.bench import pooled, random_model
from hearth.bench.contenders.gguf_model import GGUFType, write_gguf
from hearth.bench.pooled import gguf_tensors, write_pooled_engine
from hearth.bench.random_model import (
    END_ID,
    QUICK_SHAPE,
    SHAPE_06B,
    write_random_model,
    write_shape,
    write_tokenizer,
)
from hearth.runtime.config import load_config
from hearth.runtime.engine_folder import verify_folder
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.weights import Quantised, unpack, widen
from hearth.runtime.weights.weights_file import load_layout


def test_shards_hold_what_the_index_says(quick_model: Path) -> None:
    index = json.loads((quick_model / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {path.name: load_file(path) for path in quick_model.glob("*.safetensors")}
    assert {name: shard for shard, held in shards.items() for name in held} == index
    assert len(index) == 2 + 11 * QUICK_SHAPE.layers


def test_weights_are_bfloat16_and_lively(quick_model: Path) -> None:
    weights: dict[str, Any] = {}
    for path in quick_model.glob("*.safetensors"):
        weights |= load_file(path)
    query = weights["model.layers.1.self_attn.q_proj.weight"]
    assert query.dtype == ml_dtypes.bfloat16
    assert query.shape == (QUICK_SHAPE.heads * QUICK_SHAPE.head_dim, QUICK_SHAPE.hidden)
    assert 0.07 < float(np.std(query.astype(np.float32))) < 0.09


def test_the_seed_alone_decides(quick_model: Path, tmp_path: Path) -> None:
    shape = structs.replace(QUICK_SHAPE, layers=1)
    shards = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_model(tmp_path / name, shape, seed=seed)
        shards.append((tmp_path / name / "model-00001-of-00002.safetensors").read_bytes())
    assert shards[0] == shards[1] != shards[2]
    assert quick_model.is_dir()


def test_progress_counts_shards_and_a_broken_attempt_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial" / "leftover").touch()
    seen: list[tuple[int, int]] = []
    write_random_model(
        tmp_path / "model",
        structs.replace(QUICK_SHAPE, layers=8),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "leftover").exists()


def test_the_large_shape_is_that_of_the_published_model() -> None:
    shape = SHAPE_06B
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    assert round((shape.layers * layer + shape.vocabulary * shape.hidden) / 1e6) == 596


def test_pooled_weights_are_as_wide_and_do_not_repeat_from_row_to_row(tmp_path: Path) -> None:
    write_random_model(tmp_path / "m", QUICK_SHAPE, pooled=True)
    shard = load_file(next((tmp_path / "m").glob("*00001*.safetensors")))
    rows = shard["model.layers.0.mlp.gate_proj.weight"].astype(np.float32)
    assert rows.std() == pytest.approx(0.64 / 8, rel=0.05)
    assert len(np.unique(rows[:, 0])) > 32


def test_a_pool_gives_more_than_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_model, "_POOL", 7)
    numbers = random_model.Normals(0, pooled=True)
    first, second = numbers.draw(3, 5, width=0.5), numbers.draw(3, 5, width=0.5)
    assert len(np.unique(first)) == 7
    assert first.shape == (3, 5)
    same = random_model.Normals(0, pooled=True)
    assert np.array_equal(first, same.draw(3, 5, width=0.5))
    assert not np.array_equal(first, second)
    assert len(np.unique(same.draw(2, 3, width=0.1, middle=1.0))) == 6


def test_numbers_lie_around_their_middle() -> None:
    for from_pool in (False, True):
        drawn = random_model.Normals(0, pooled=from_pool).draw(9999, width=0.1, middle=1.0)
        assert drawn.astype(np.float32).mean() == pytest.approx(1, abs=0.01)
        assert drawn.astype(np.float32).std() == pytest.approx(0.1, rel=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 300)
    return folder


def test_the_vocabulary_has_the_size_asked_for(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300
    assert sorted(tokenizer.get_vocab().values()) == list(range(300))


def test_the_end_token_is_the_one_the_configuration_names(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    configuration = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer.token_to_id(configuration["eos_token"]) == END_ID


@settings(max_examples=50)
@given(text=st.text(max_size=40))
def test_any_text_survives_the_round_trip(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


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
