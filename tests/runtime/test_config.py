import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hearth.runtime.config import (
    BASE_CONFIG_FILE,
    CONFIG_FILE,
    DRAFT_CONFIG_FILE,
    FileRecord,
    RopeConfig,
    config_file,
    load_config,
    parse_config,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.export.reference_pass import rope_frequencies, rope_tables
from hearth.runtime.vision_config import (
    VISION_CONFIG_FILE,
    VISION_FOLDER,
    VisionTokens,
    load_vision_config,
    parse_vision_config,
)
from tests.runtime.engine_configs import draft_config, small_config
from tests.runtime.vision.tower_config import config_of


def fields() -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(small_config()))
    return decoded


KERNELS: dict[str, Any] = {
    "backend": "kernels",
    "device": "cuda",
    "dtype": "float16",
    "kv_cache_dtype": "float16",
    "head_dim": 16,
    "external_weight_files": ["weights.safetensors"],
}


def fault(**changes: Any) -> HearthError:
    with pytest.raises(HearthError) as caught:
        parse_config(msgspec.json.encode(fields() | changes))
    return caught.value


def test_a_configuration_survives_being_written_and_read() -> None:
    config = msgspec.structs.replace(
        small_config(),
        rope_config=RopeConfig(type="llama3", factor=8.0),
        files={"model.onnx": FileRecord(3, "abc")},
        eos_token_ids=(2, 0),
    )
    assert parse_config(msgspec.json.encode(config)) == config


def test_every_field_is_written() -> None:
    assert set(fields()) == {field.name for field in msgspec.structs.fields(small_config())}


def test_an_unknown_field_is_refused() -> None:
    assert fault(surprise=1).code == "engine_corrupt"


@pytest.mark.parametrize("name", ["dialect", "num_decoder_layers", "rope_config"])
def test_a_missing_field_is_refused(name: str) -> None:
    kept = {key: value for key, value in fields().items() if key != name}
    with pytest.raises(HearthError) as caught:
        parse_config(msgspec.json.encode(kept))
    assert caught.value.code == "engine_corrupt"
    assert name in caught.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float8"},
        {"num_kv_heads": "one"},
        {"vocab_size": 1.5},
        {"rope_config": {"type": "yarn"}},
        {"files": {"a": {"bytes": 1}}},
    ],
    ids=str,
)
def test_a_wrong_type_or_choice_is_refused(changes: dict[str, Any]) -> None:
    assert fault(**changes).code == "engine_corrupt"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_attention_heads": 3, "num_kv_heads": 2}, "num_kv_heads"),
        ({"rotary_dim": 7}, "rotary_dim"),
        ({"rotary_dim": 10}, "rotary_dim"),
        ({"max_supported_input_length": 65}, "max_supported_input_length"),
        ({"eos_token_ids": []}, "eos_token_ids"),
        ({"eos_token_ids": [2, 100]}, "eos_token_ids"),
        ({"eos_token_ids": [-1]}, "eos_token_ids"),
        ({"backend": "tensorrt"}, "device"),
        ({"backend": "simulated", "device": "cuda"}, "device"),
        ({"static_decode_batches": [2, 1, 4]}, "static_decode_batches"),
        ({"static_decode_batches": [0, 4]}, "static_decode_batches"),
        ({"num_attention_layers": 1}, "num_attention_layers"),
        ({"output_vocab_size": 99}, "output_vocab_size"),
        ({"use_trt_native_ops": False}, "use_trt_native_ops"),
        ({"dialect": "classic"}, "use_trt_native_ops"),
        ({"weight_quantization": "int8"}, "weight_block_size"),
        ({"weight_quantization": "int4", "weight_block_size": -32}, "weight_block_size"),
        ({"weight_block_size": 32}, "weight_block_size"),
        ({"max_supported_lora_rank": 8}, "lora_targets"),
        ({"max_supported_lora_rank": -1}, "max_supported_lora_rank"),
        ({"lora_targets": ["qkv", "o", "gate_up", "down"]}, "lora_targets"),
        ({"max_supported_lora_rank": 8, "lora_targets": ["v", "q"]}, "lora_targets"),
        ({"max_supported_lora_rank": 8, "lora_targets": ["qkv", "v"]}, "lora_targets"),
        ({"max_supported_lora_rank": 8, "lora_targets": ["qkv", "o", "x"]}, "lora_targets"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    error = fault(**changes)
    assert (error.code, error.field) == ("engine_corrupt", field)


def test_own_operators_of_a_library_are_refused_with_the_export_that_replaces_them() -> None:
    for named, model in (({"model_name": "home"}, "home"), ({}, "MODEL_DIR")):
        error = fault(operators="contrib", device="cuda", **named)
        assert (error.code, error.field) == ("engine_incompatible", "operators")
        assert f"run hearth export {model} ENGINE_DIR --device cuda" in error.message


def test_an_engine_of_kernels_is_read_as_it_was_written() -> None:
    config = parse_config(msgspec.json.encode(fields() | KERNELS))
    assert parse_config(msgspec.json.encode(config)) == config


def test_a_draft_of_kernels_has_weights_of_its_own() -> None:
    base = parse_config(msgspec.json.encode(fields() | KERNELS))
    draft = draft_config(base)
    assert parse_config(msgspec.json.encode(draft)) == draft
    other = msgspec.structs.replace(draft, backend="onnxruntime")
    with pytest.raises(HearthError) as caught:
        parse_config(msgspec.json.encode(other))
    assert caught.value.field == "external_weight_files"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device": "cpu"}, "device"),
        ({"dialect": "classic", "use_trt_native_ops": False}, "dialect"),
        ({"dtype": "float32", "kv_cache_dtype": "float32"}, "dtype"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype"),
        ({"external_weight_files": []}, "external_weight_files"),
        ({"static_decode_batches": [1, 2]}, "static_decode_batches"),
        ({"head_dim": 24}, "head_dim"),
        ({"head_dim": 272}, "head_dim"),
        ({"hidden_size": 20}, "hidden_size"),
        ({"intermediate_size": 36}, "intermediate_size"),
        ({"num_attention_heads": 17}, "num_attention_heads"),
    ],
    ids=str,
)
def test_what_kernels_do_not_serve_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    error = fault(**{**KERNELS, **changes})
    assert (error.code, error.field) == ("engine_corrupt", field)


def test_a_folder_of_the_format_before_is_read_and_told_of() -> None:
    assert parse_config(msgspec.json.encode(fields())).outdated == ""
    older = fields() | {"engine_format": 1, "model_name": "qwen3"}
    del older["template_tokens"]
    assert "run hearth export again on qwen3" in parse_config(msgspec.json.encode(older)).outdated
    simulated = older | {"backend": "simulated"}
    assert parse_config(msgspec.json.encode(simulated)).outdated == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine_format", 3),
        ("audio_token_id", 5),
        ("mamba_num_heads", 4),
        ("ssm_state_size", 16),
        ("conv_kernel", 4),
    ],
)
def test_an_engine_of_another_kind_is_refused_by_name(name: str, value: Any) -> None:
    error = fault(**{name: value})
    assert (error.code, error.field) == ("engine_incompatible", name)


@pytest.mark.parametrize("targets", ["q k v o gate up down", "qkv o gate_up down", "v up"])
def test_an_engine_that_takes_adapters(targets: str) -> None:
    names = targets.split()
    taking = fields() | {"max_supported_lora_rank": 8, "lora_targets": names}
    assert parse_config(msgspec.json.encode(taking)).lora_targets == tuple(names)


def test_recurrent_layers_are_refused_by_name() -> None:
    error = fault(num_mamba_layers=1, num_attention_layers=1)
    assert (error.code, error.field) == ("engine_incompatible", "num_mamba_layers")


MROPE = {"type": "mrope", "mrope_section": [2, 1, 1]}
IMAGES = {
    "image_token_id": 5,
    "num_deepstack_features": 2,
    "use_context_dependent_rope": True,
    "rope_config": MROPE,
}


def test_a_model_that_takes_images() -> None:
    config = parse_config(msgspec.json.encode(fields() | IMAGES))
    assert config.rope_config.mrope_section == (2, 1, 1)
    assert not config.rope_config.mrope_interleaved
    plain = parse_config(msgspec.json.encode(fields() | {"image_token_id": 5}))
    assert not plain.use_context_dependent_rope


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"image_token_id": 100}, "image_token_id"),
        ({"image_token_id": -1}, "image_token_id"),
        ({"image_token_id": 0}, "num_deepstack_features"),
        ({"num_deepstack_features": 3}, "num_deepstack_features"),
        ({"num_deepstack_features": -1}, "num_deepstack_features"),
        ({"use_context_dependent_rope": False}, "use_context_dependent_rope"),
        ({"rope_config": {}}, "use_context_dependent_rope"),
        ({"rope_config": {"type": "mrope"}}, "rope_config"),
        ({"rope_config": MROPE | {"type": "linear"}}, "rope_config"),
        ({"rope_config": MROPE | {"mrope_section": [2, 2]}}, "rope_config"),
        ({"rope_config": MROPE | {"mrope_section": [4, 0, 0]}}, "rope_config"),
        ({"rope_config": MROPE | {"mrope_section": [2, 1, 2]}}, "rope_config"),
        ({"rotary_dim": 6}, "rope_config"),
    ],
    ids=str,
)
def test_a_model_of_images_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], field: str
) -> None:
    error = fault(**IMAGES | changes)
    assert (error.code, error.field) == ("engine_corrupt", field)


EAGLE = {
    "enable_eagle_spec_decode": True,
    "eagle_layers": [0, 1, 2],
    "output_hidden_dim": 48,
    "max_verify_tree_size": 16,
}
DRAFT = {
    "architecture": "eagle3",
    "num_decoder_layers": 1,
    "num_attention_layers": 1,
    "base_hidden_dim": 48,
    "max_draft_tree_size": 12,
    "output_vocab_size": 60,
}
PLAN_DRAFT = DRAFT | {"static_decode_batches": [1, 4], "static_drafting": [4, 3]}


@pytest.mark.parametrize("kind", [EAGLE, DRAFT, PLAN_DRAFT], ids=["base", "draft", "plan"])
def test_engines_for_speculation_take_a_tree_mask_unless_they_are_causal(
    kind: dict[str, Any],
) -> None:
    assert parse_config(msgspec.json.encode(fields() | kind)).takes_tree_mask
    assert not parse_config(msgspec.json.encode(fields() | kind)).takes_packed_mask
    causal = fields() | kind | {"chains_only": True}
    assert not parse_config(msgspec.json.encode(causal)).takes_tree_mask
    assert not parse_config(msgspec.json.encode(fields())).takes_tree_mask


def test_a_folder_from_before_chains_takes_trees() -> None:
    old = {key: value for key, value in (fields() | EAGLE).items() if key != "chains_only"}
    assert parse_config(msgspec.json.encode(old)).takes_tree_mask


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (EAGLE | {"eagle_layers": [0, 1, 1]}, "eagle_layers"),
        (EAGLE | {"eagle_layers": [0, 1, 3]}, "eagle_layers"),
        (EAGLE | {"eagle_layers": [-1, 0, 1]}, "eagle_layers"),
        (EAGLE | {"eagle_layers": [], "output_hidden_dim": 0}, "eagle_layers"),
        (EAGLE | {"enable_eagle_spec_decode": False}, "eagle_layers"),
        (EAGLE | {"output_hidden_dim": 47}, "output_hidden_dim"),
        ({"output_hidden_dim": 16}, "output_hidden_dim"),
        (EAGLE | {"max_verify_tree_size": 0}, "max_verify_tree_size"),
        ({"max_verify_tree_size": 65}, "max_verify_tree_size"),
        (
            {"max_verify_tree_size": 129, "max_kv_cache_capacity": 512},
            "max_verify_tree_size",
        ),
        ({"max_verify_tree_size": -1}, "max_verify_tree_size"),
        (DRAFT | {"base_hidden_dim": 0}, "base_hidden_dim"),
        (DRAFT | {"max_supported_lora_rank": 8}, "max_supported_lora_rank"),
        (DRAFT | {"max_draft_tree_size": 0}, "max_draft_tree_size"),
        (DRAFT | {"max_draft_tree_size": 65}, "max_draft_tree_size"),
        (DRAFT | {"num_decoder_layers": 2, "num_attention_layers": 2}, "num_decoder_layers"),
        (DRAFT | {"output_vocab_size": 101}, "output_vocab_size"),
        (PLAN_DRAFT | {"static_drafting": []}, "static_drafting"),
        (PLAN_DRAFT | {"static_drafting": [4]}, "static_drafting"),
        (PLAN_DRAFT | {"static_drafting": [-4, -3]}, "static_drafting"),
        (PLAN_DRAFT | {"static_drafting": [4, 4]}, "static_drafting"),
        (DRAFT | {"static_drafting": [4, 3]}, "static_drafting"),
        ({"base_hidden_dim": 48}, "base_hidden_dim"),
        ({"max_draft_tree_size": 4}, "max_draft_tree_size"),
        ({"chains_only": True}, "chains_only"),
    ],
    ids=str,
)
def test_speculation_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], field: str
) -> None:
    error = fault(**changes)
    assert (error.code, error.field) == ("engine_corrupt", field)


@pytest.mark.parametrize(
    ("kind", "name"),
    [({}, CONFIG_FILE), (EAGLE, BASE_CONFIG_FILE), (DRAFT, DRAFT_CONFIG_FILE)],
    ids=["plain", "base", "draft"],
)
def test_a_configuration_lies_in_the_file_of_its_kind(
    tmp_path: Path, kind: dict[str, Any], name: str
) -> None:
    data = msgspec.json.encode(fields() | kind)
    config = parse_config(data)
    assert config_file(config) == name
    (tmp_path / name).write_bytes(data)
    assert load_config(tmp_path) == config


def test_a_folder_without_configuration_is_missing(tmp_path: Path) -> None:
    with pytest.raises(HearthError) as caught:
        load_config(tmp_path)
    assert caught.value.code == "engine_missing"
    assert caught.value.field == "engine"


@given(st.binary(max_size=200) | st.just(b"[" * 100_000))
def test_garbage_is_refused_without_another_exception(data: bytes) -> None:
    with pytest.raises(HearthError):
        parse_config(data)


@given(st.data())
def test_a_damaged_configuration_is_read_or_refused(data: st.DataObject) -> None:
    encoded = bytearray(msgspec.json.encode(small_config()))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] = data.draw(st.integers(0, 255))
    try:
        parse_config(bytes(encoded))
    except HearthError as error:
        assert error.code in {"engine_corrupt", "engine_incompatible"}  # noqa: PT017 - either code is right


def test_a_folder_that_is_none_of_ours_is_not_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(HearthError, match=f"{tmp_path} is not an engine folder"):
        load_config(tmp_path)
    with pytest.raises(HearthError, match=f"there is no {tmp_path / 'none'}"):
        load_config(tmp_path / "none")


def test_a_model_is_not_said_to_be_a_damaged_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "_name_or_path": "x"}')
    with pytest.raises(HearthError, match=f"{tmp_path} is a model: hearth export") as caught:
        load_config(tmp_path)
    assert caught.value.code == "engine_missing"


def test_a_configuration_that_cannot_be_read_is_named_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / BASE_CONFIG_FILE
    path.mkdir()
    with pytest.raises(HearthError, match=r"base_config\.json cannot be read \(Is a directory\)"):
        load_config(tmp_path)
    path.rmdir()
    path.write_text("{")
    with pytest.raises(HearthError, match=f"^{path} cannot be read"):
        load_config(tmp_path)
    path.write_bytes(msgspec.json.encode(fields() | {"engine_format": 9}))
    with pytest.raises(HearthError, match=f"^{path} has engine format 9"):
        load_config(tmp_path)


LLAMA3 = RopeConfig(
    type="llama3",
    theta=500_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def test_frequencies_fall_from_one_to_almost_the_inverse_of_theta() -> None:
    frequencies = rope_frequencies(RopeConfig(theta=10_000.0), 8)
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_scaling_divides_every_frequency() -> None:
    plain = rope_frequencies(RopeConfig(), 16)
    scaled = rope_frequencies(RopeConfig(type="linear", factor=4.0), 16)
    np.testing.assert_array_equal(scaled, plain / np.float32(4))


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    plain = rope_frequencies(RopeConfig(theta=LLAMA3.theta), 32)
    ratio = rope_frequencies(LLAMA3, 32) / plain
    waves = 2 * math.pi / plain
    assert (ratio[waves < 16] == 1).all()
    np.testing.assert_allclose(ratio[waves > 64], 1 / 8, rtol=1e-6)
    between = ratio[(waves > 16) & (waves < 64)]
    assert between.size > 0
    assert ((between > 1 / 8) & (between < 1)).all()


def test_no_rotation_means_cosine_one_and_sine_zero() -> None:
    cos, sin = rope_tables(RopeConfig(type="none"), 8, 5)
    assert (cos == 1).all()
    assert (sin == 0).all()


@given(st.integers(1, 64), st.integers(1, 40))
def test_tables_are_unit_rotations_that_begin_at_rest(half: int, positions: int) -> None:
    cos, sin = rope_tables(RopeConfig(), 2 * half, positions)
    assert cos.shape == sin.shape == (positions, half)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos**2 + sin**2, 1, rtol=1e-5)
    assert (cos[0] == 1).all()


@pytest.mark.reference
@pytest.mark.parametrize("rope", [RopeConfig(theta=1e6), LLAMA3], ids=["default", "llama3"])
def test_tables_equal_those_of_transformers(rope: RopeConfig) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: PLC0415 - as above

    parameters = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.type == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        parameters |= {name: getattr(rope, name) for name in names}
        parameters["original_max_position_embeddings"] = 64
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=parameters
    )
    positions = torch.arange(4096)[None]
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions)
    for ours, table in zip(rope_tables(rope, 128, 4096), theirs, strict=True):
        np.testing.assert_allclose(ours, table[0, :, :64].numpy(), atol=3e-4)


CONFIG = config_of("qwen3_vl", position_side=12, deepstack_layers=(0, 1))


def changed(**fields: object) -> bytes:
    return msgspec.json.encode(msgspec.structs.asdict(CONFIG) | fields)


def test_a_folder_has_its_tower_or_none(tmp_path: Path) -> None:
    assert load_vision_config(tmp_path) is None
    (tmp_path / VISION_FOLDER).mkdir()
    with pytest.raises(HearthError) as caught:
        load_vision_config(tmp_path)
    assert (caught.value.code, caught.value.field) == ("engine_missing", "visual")
    (tmp_path / VISION_FOLDER / VISION_CONFIG_FILE).write_bytes(changed())
    assert load_vision_config(tmp_path) == CONFIG


@pytest.mark.parametrize(
    ("data", "code", "field"),
    [
        (b"{", "engine_corrupt", "visual"),
        (changed(unknown=1), "engine_corrupt", "visual"),
        (changed(family="clip"), "engine_corrupt", "visual"),
        (changed(engine_format=99), "engine_incompatible", "engine_format"),
        (changed(merge_size=0), "engine_corrupt", "merge_size"),
        (changed(temporal_patch_size=0), "engine_corrupt", "temporal_patch_size"),
        (changed(position_side=0), "engine_corrupt", "position_side"),
        (changed(head_dim=8), "engine_corrupt", "head_dim"),
        (changed(max_patches=4095), "engine_corrupt", "max_patches"),
        (changed(window_size=112), "engine_corrupt", "window_size"),
        (changed(deepstack_layers=(1, 0)), "engine_corrupt", "deepstack_layers"),
        (changed(deepstack_layers=(0, 2)), "engine_corrupt", "deepstack_layers"),
        (changed(full_attention_layers=(-1,)), "engine_corrupt", "full_attention_layers"),
        (changed(rules=replace(CONFIG.rules, min_pixels=0)), "engine_corrupt", "rules"),
        (changed(rules=replace(CONFIG.rules, tile_size=28)), "engine_corrupt", "rules"),
        (changed(rules=replace(CONFIG.rules, std=(1, 0, 1))), "engine_corrupt", "rules"),
        (changed(tokens=VisionTokens(image=-1)), "engine_corrupt", "tokens"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, code: str, field: str) -> None:
    with pytest.raises(HearthError) as caught:
        parse_vision_config(data)
    assert (caught.value.code, caught.value.field) == (code, field)
