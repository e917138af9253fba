import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hearth.bench.contenders.gguf_model import GGUFType, gguf_name, write_gguf
from hearth.runtime.errors import HearthError

gguf = pytest.importorskip("gguf")
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 4)


def weights_of(folder: Path) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    return {name: value.astype(np.float32) for name, value in weights.items()}


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("F32", 0.0), ("F16", 1e-6), ("BF16", 0.0), ("Q8_0", 0.002), ("Q4_0", 0.05)],
)
def test_every_tensor_is_there_with_its_values(
    quick_model: Path, tmp_path: Path, kind: GGUFType, tolerance: float
) -> None:
    target = tmp_path / "model.gguf"
    write_gguf(quick_model, target, kind)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    weights = weights_of(quick_model)
    assert set(read) == {gguf_name(NAMES, name) for name in weights}
    for name, expected in weights.items():
        tensor = read[gguf_name(NAMES, name)]
        assert tensor.tensor_type.name == (kind if expected.ndim > 1 else "F32")
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(expected.shape)
        np.testing.assert_allclose(values, expected, atol=tolerance)


def test_metadata_follows_the_configuration(quick_model: Path, tmp_path: Path) -> None:
    write_gguf(quick_model, tmp_path / "model.gguf", "F32")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    config = json.loads((quick_model / "config.json").read_text())
    found = {
        name: fields[f"qwen3.{name}"].contents()
        for name in ("block_count", "attention.head_count_kv", "rope.freq_base", "vocab_size")
    }
    assert found == {
        "block_count": config["num_hidden_layers"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": config["rope_theta"],
        "vocab_size": config["vocab_size"],
    }


def test_a_stored_copy_of_the_tied_head_is_left_out(quick_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    weights = weights_of(quick_model)
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding}, source / "model.safetensors")
    (source / "config.json").write_text((quick_model / "config.json").read_text())
    seen: list[tuple[int, int]] = []
    write_gguf(source, tmp_path / "model.gguf", "F32", lambda *counts: seen.append(counts))
    assert seen[-1] == (len(weights), len(weights))


def test_a_foreign_tensor_is_refused_by_name() -> None:
    assert gguf_name(NAMES, "model.layers.3.mlp.up_proj.weight") == "blk.3.ffn_up.weight"
    with pytest.raises(HearthError) as caught:
        gguf_name(NAMES, "model.layers.3.self_attn.q_proj.bias")
    assert caught.value.field == "model.layers.3.self_attn.q_proj.bias"
