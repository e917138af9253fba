import json
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

from hearth.bench import random_model
from hearth.bench.random_model import (
    END_ID,
    QUICK_SHAPE,
    SHAPE_06B,
    write_random_model,
    write_tokenizer,
)


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
    for pooled in (False, True):
        drawn = random_model.Normals(0, pooled=pooled).draw(9999, width=0.1, middle=1.0)
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
