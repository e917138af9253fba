import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.export.model_config import load_model_config
from tests.references import reference_folder
from tests.runtime.export.hugging_face import copy_model


def fault(folder: Path) -> tuple[str, str | None]:
    with pytest.raises(HearthError) as caught:
        load_model_config(folder)
    return caught.value.code, caught.value.field


def test_a_qwen3_model() -> None:
    model = load_model_config(reference_folder("qwen3"))
    assert (model.architecture, model.num_layers, model.head_dim) == ("qwen3", 3, 16)
    assert (model.query_size, model.kv_size) == (64, 32)
    assert model.qk_norm
    assert model.tied_head
    assert not model.attention_bias
    assert model.eos_token_ids == (2, 0)
    assert model.bos_token_id == 0


def test_a_qwen2_model_has_biases_and_no_norms() -> None:
    model = load_model_config(reference_folder("qwen2"))
    assert model.attention_bias
    assert not model.qk_norm
    assert model.eos_token_ids == (2,)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_part_of_a_head_is_not_rotated(tmp_path: Path, name: str) -> None:
    folder = copy_model(name, tmp_path / "m", partial_rotary_factor=0.5)
    assert fault(folder) == ("model_unsupported", "partial_rotary_factor")


def test_biases_of_llama_and_qwen3_are_read(tmp_path: Path) -> None:
    model = load_model_config(reference_folder("llama_biased"))
    assert (model.attention_bias, model.output_bias, model.mlp_bias) == (True, True, True)
    model = load_model_config(copy_model("qwen3", tmp_path / "m", attention_bias=True))
    assert (model.attention_bias, model.output_bias, model.mlp_bias) == (True, True, False)
    model = load_model_config(reference_folder("qwen2"))
    assert (model.attention_bias, model.output_bias, model.mlp_bias) == (True, False, False)


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def test_a_mistral_model_is_a_llama(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m", **MISTRAL)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": None}))
    llama = load_model_config(reference_folder("llama"))
    assert load_model_config(folder) == structs.replace(llama, architecture="mistral")
    # Its class has a window where nothing is said.
    folder = copy_model("llama", tmp_path / "older", **MISTRAL)
    assert load_model_config(folder).window == 4096


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("name", "fields", "window"),
    [
        ("llama", {"sliding_window": 64}, 64),
        ("llama", {"sliding_window": 64, "layer_types": [SLIDING, FULL]}, 64),
        ("llama", {"sliding_window": 64, "layer_types": [FULL, FULL]}, None),
        ("llama", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("llama", MISTRAL | {"sliding_window": 64, "layer_types": [FULL]}, 64),
        ("qwen2", {"sliding_window": 64}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, 64),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, 64),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ("qwen3", {"sliding_window": 9, "use_sliding_window": True, "layer_types": [SLIDING]}, 9),
    ],
)
def test_a_window_is_that_of_the_class_in_transformers(
    tmp_path: Path, name: str, fields: dict[str, Any], window: int | None
) -> None:
    absent = {"layer_types": None, "sliding_window": None} | fields
    model = load_model_config(copy_model(name, tmp_path / "m", **absent))
    assert model.window == window


def test_what_the_first_llama_models_left_out(tmp_path: Path) -> None:
    names = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_parameters")
    absent = dict.fromkeys((*names, "tie_word_embeddings"))
    model = load_model_config(copy_model("llama", tmp_path / "m", **absent))
    assert (model.head_dim, model.num_kv_heads, model.rope.theta) == (8, 4, 10_000.0)
    assert model.rms_norm_eps == 1e-6
    assert not model.tied_head


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "model_type", "gemma"),
        ("llama", "architectures", ["LlamaForSequenceClassification"]),
        ("llama", "architectures", "LlamaForCausalLM"),
        ("llama", "hidden_act", "gelu"),
        ("qwen2", "mlp_bias", True),
        ("qwen2", "attention_bias", True),
        ("qwen3", "mlp_bias", True),
        ("llama", "pretraining_tp", 2),
        ("llama", "quantization_config", {"quant_method": "gptq"}),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("llama", "layer_types", ["sliding_attention"]),
        ("llama", "layer_types", ["full_attention", "linear_attention"]),
        ("qwen3", "num_experts", 8),
        ("llama", "logits_scaling", 2.0),
        ("llama", "some_new_field", "x"),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(
    tmp_path: Path, name: str, field: str, value: Any
) -> None:
    folder = copy_model(name, tmp_path / "m", **{field: value})
    assert fault(folder) == ("model_unsupported", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_cache", True),
        ("_name_or_path", "somewhere"),
        ("mlp_bias", False),
        ("quantization_config", {}),
        ("some_new_field", 0),
        ("hidden_act", "swish"),
    ],
)
def test_what_changes_nothing_is_taken(tmp_path: Path, field: str, value: Any) -> None:
    original = load_model_config(reference_folder("llama"))
    folder = copy_model("llama", tmp_path / "m", **{field: value})
    assert load_model_config(folder) == original


def test_a_window_that_is_switched_off_is_taken(tmp_path: Path) -> None:
    fields = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21}
    folder = copy_model("qwen2", tmp_path / "m", **fields)
    assert load_model_config(folder) == load_model_config(reference_folder("qwen2"))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "vocab_size", None),
        ("llama", "hidden_size", "32"),
        ("llama", "num_hidden_layers", 0),
        ("qwen3", "head_dim", None),
        ("qwen3", "num_key_value_heads", None),
        ("llama", "num_key_value_heads", 3),
        ("llama", "rms_norm_eps", 0),
        ("llama", "tie_word_embeddings", "yes"),
        ("llama", "model_type", None),
        ("llama", "bos_token_id", 288),
        ("llama", "head_dim", 15),
        ("llama", "sliding_window", 0),
        ("llama", "attention_bias", "yes"),
    ],
)
def test_a_missing_or_malformed_field_is_named(
    tmp_path: Path, name: str, field: str, value: Any
) -> None:
    folder = copy_model(name, tmp_path / "m", **{field: value})
    assert fault(folder) == ("model_invalid", field)


def test_heads_must_share_the_hidden_size_evenly(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m", head_dim=None, num_attention_heads=5)
    assert fault(folder) == ("model_invalid", "hidden_size")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([7, 8], 2, (7, 8)), (7, None, (7,)), (None, [2, 3], (2, 3))],
)
def test_end_tokens_of_the_generation_settings_come_first(
    tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    folder = copy_model("llama", tmp_path / "m", eos_token_id=config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_model_config(folder).eos_token_ids == expected


def test_a_model_without_end_token_is_refused(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert fault(folder) == ("model_invalid", "eos_token_id")


def test_an_end_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = copy_model("qwen2", tmp_path / "m", eos_token_id=[2, 288])
    assert fault(folder) == ("model_invalid", "eos_token_id")


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    assert fault(tmp_path) == ("model_invalid", "config.json")
