from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions
from hearth.runtime.export.engine_files import engine_config, resolve_head
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.packages import VERSION
from tests.references import reference_folder

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
