import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.config import RopeConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions
from hearth.runtime.export.engine_files import engine_config, resolve_head
from hearth.runtime.export.json_file import Fields
from hearth.runtime.export.model_config import load_model_config, read_rope
from hearth.runtime.packages import VERSION
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


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**fields: Any) -> RopeConfig:
    return read_rope(Fields(fields, "config.json"), 64)


def rope_fault(**fields: Any) -> tuple[str, str | None]:
    with pytest.raises(HearthError) as caught:
        read(**fields)
    return caught.value.code, caught.value.field


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "default"}, RopeConfig(theta=1e6)),
        ({"rope_type": "linear", "factor": 4.0}, RopeConfig(type="linear", theta=1e6, factor=4.0)),
        (
            {"rope_type": "llama3", **LLAMA3},
            RopeConfig(
                type="llama3",
                theta=1e6,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
    ],
    ids=["default", "linear", "llama3"],
)
def test_both_spellings_say_the_same(scaling: dict[str, Any], expected: RopeConfig) -> None:
    assert read(rope_theta=1e6, rope_scaling=scaling) == expected
    assert read(rope_parameters={"rope_theta": 1e6, **scaling}) == expected


def test_the_oldest_spelling_of_the_type() -> None:
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).factor == 2.0


@pytest.mark.parametrize("fields", [{}, {"rope_scaling": None}])
def test_nothing_stated_means_plain_rotation(fields: dict[str, Any]) -> None:
    assert read(**fields) == RopeConfig(theta=10_000.0)


def test_a_theta_beside_rope_parameters_counts_when_they_have_none() -> None:
    assert read(rope_theta=5e5, rope_parameters={"rope_type": "default"}).theta == 5e5


@pytest.mark.parametrize(
    ("factor", "code"),
    [(0.5, "model_unsupported"), (1e308, "model_unsupported"), (0, "model_invalid")],
)
def test_a_part_of_the_head_is_not_rotated(factor: float, code: str) -> None:
    partial = {"partial_rotary_factor": factor}
    assert rope_fault(**partial) == (code, "partial_rotary_factor")
    for place in ("rope_parameters", "rope_scaling"):
        scaling = {"rope_type": "default", **partial}
        assert rope_fault(**{place: scaling}) == (code, "partial_rotary_factor")
        # The field beside it is read where it says otherwise.
        beside = {place: {"rope_type": "default", "partial_rotary_factor": 1.0}}
        assert rope_fault(**beside, **partial) == (code, "partial_rotary_factor")


def test_whole_heads_may_be_stated() -> None:
    assert read(partial_rotary_factor=1, rope_scaling=None) == RopeConfig()


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "mrope", "su"])
def test_an_unserved_kind_is_refused(kind: str) -> None:
    expected = ("model_unsupported", "rope_type")
    assert rope_fault(rope_scaling={"type": kind, "factor": 2.0}) == expected
    assert rope_fault(rope_parameters={"rope_type": kind, "factor": 2.0}) == expected


def test_an_unserved_parameter_is_refused_by_name() -> None:
    scaling = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    assert rope_fault(rope_scaling=scaling) == ("model_unsupported", "mrope_section")


@pytest.mark.parametrize("name", list(LLAMA3))
def test_a_missing_parameter_is_named(name: str) -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != name}
    assert rope_fault(rope_scaling={"rope_type": "llama3", **scaling}) == (
        "model_invalid",
        name,
    )


def test_limits_of_llama3_must_be_in_order() -> None:
    scaling = {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}
    assert rope_fault(rope_scaling=scaling) == ("model_invalid", "high_freq_factor")


MODEL = load_model_config(reference_folder("qwen3"))


def test_sizes_come_from_the_model() -> None:
    config = engine_config(MODEL, ExportOptions())
    assert (config.architecture, config.hearth_version) == ("qwen3", VERSION)
    assert (config.num_decoder_layers, config.num_attention_layers) == (3, 3)
    assert (config.num_attention_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.output_vocab_size) == (288, 288)
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 0), 0)


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    config = engine_config(MODEL, ExportOptions(capacity=100))
    assert (config.max_kv_cache_capacity, config.max_supported_input_length) == (100, 99)


def test_a_chunk_is_no_longer_than_the_capacity() -> None:
    assert engine_config(MODEL, ExportOptions(capacity=100)).prefill_chunk == 100
    assert engine_config(MODEL, ExportOptions(prefill_chunk=64)).prefill_chunk == 64


@pytest.mark.parametrize(("dialect", "native"), [("native", True), ("classic", False)])
def test_the_dialect(dialect: str, native: bool) -> None:  # noqa: FBT001 # a parameter
    chosen = ExportOptions(dialect="native" if native else "classic", dtype="float16")
    config = engine_config(MODEL, chosen)
    assert (config.dialect, config.use_trt_native_ops) == (dialect, native)
    assert (config.dtype, config.kv_cache_dtype) == ("float16", "float16")


def test_a_block_size_is_stated_only_where_weights_are_quantised() -> None:
    assert engine_config(MODEL, ExportOptions()).weight_block_size == 0
    quantized = engine_config(MODEL, ExportOptions(quantization="int8", block_size=16))
    assert (quantized.weight_quantization, quantized.weight_block_size) == ("int8", 16)


@pytest.mark.parametrize(
    ("window", "capacity", "expected"),
    [
        (512, 0, 512),
        (4096, 0, 512),
        (100, 100, 100),
        (100, 101, ("invalid_value", "capacity")),
        (100, 0, ("model_unsupported", "sliding_window")),
    ],
)
def test_a_window_has_to_hide_nothing(window: int, capacity: int, expected: Any) -> None:
    model = structs.replace(load_model_config(reference_folder("llama")), window=window)
    options = ExportOptions(capacity=capacity)
    if isinstance(expected, int):
        assert engine_config(model, options).max_kv_cache_capacity == expected
        return
    with pytest.raises(HearthError, match=f"--capacity {window}") as caught:
        engine_config(model, options)
    assert (caught.value.code, caught.value.field) == expected


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_kernels_add_no_bias_that_they_have_not(field: str) -> None:
    model = load_model_config(reference_folder("llama_biased"))
    fields = {"output_bias": field == "attention_bias", "mlp_bias": field == "mlp_bias"}
    model = structs.replace(model, **fields)
    with pytest.raises(HearthError, match="--backend onnxruntime") as caught:
        engine_config(model, ExportOptions(device="cuda", dtype="float16"))
    assert (caught.value.code, caught.value.field) == ("model_unsupported", field)
    other = ExportOptions(backend="onnxruntime", device="cuda", dtype="float16")
    assert engine_config(model, other).backend == "onnxruntime"


KERNELS = ExportOptions(device="cuda", dtype="float16")


@pytest.mark.parametrize(
    ("options", "vocabulary", "expected"),
    [
        (ExportOptions(), 288, "body"),
        (ExportOptions(quantization="int8"), 288, "body"),
        (ExportOptions(quantization="int4"), 288, "int8"),
        (ExportOptions(quantization="int4", head_quantization="body"), 288, "body"),
        (ExportOptions(quantization="int4", head_quantization="none"), 288, "none"),
        (structs.replace(KERNELS, quantization="int4"), 288, "int8"),
        # ONNX Runtime takes no int8 on CUDA.
        (structs.replace(KERNELS, quantization="int4", backend="onnxruntime"), 288, "body"),
        # A tied table counts once: 15.6 million tokens of 32 numbers.
        (ExportOptions(quantization="int4"), 15_600_000, "int8"),
        (ExportOptions(quantization="int4"), 15_625_000, "body"),
    ],
)
def test_a_small_model_of_four_bits_keeps_eight_in_its_head(
    options: ExportOptions, vocabulary: int, expected: str
) -> None:
    model = structs.replace(MODEL, vocab_size=vocabulary)
    assert MODEL.tied_head
    assert resolve_head(options, model) == expected
