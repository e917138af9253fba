"""Models that take images: folders, inputs of the decoder, and logits against transformers."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.config import Quantization, RopeConfig, load_config
from hearth.runtime.engine_folder import write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.decoder import Decoder
from hearth.runtime.export.dialect import GraphDialect
from hearth.runtime.export.graph import GraphBuilder
from hearth.runtime.export.image_families import IMAGE_FAMILIES, is_vision_tensor, text_name
from hearth.runtime.export.layout import EMBEDDING, check_tensors
from hearth.runtime.export.model_config import ModelConfig, load_model_config
from hearth.runtime.export.onnx_files import write_onnx
from hearth.runtime.export.options import Dialect
from hearth.runtime.export.reference_pass import RoundedWeights, decode, rope_tables
from hearth.runtime.export.weights import Weights
from hearth.runtime.vision_config import VISION_CONFIG_FILE, VISION_FOLDER, VisionConfig
from tests.references import reference_folder, reference_logits
from tests.references.images import image_rows, live_logits, rotary_rows, stored_logits
from tests.runtime.export.graph_driver import GraphDriver, run_rows
from tests.runtime.export.image_rows import CAPACITY, ROWS, compare_images, logits_of
from tests.runtime.export.trees import export_with_draft
from tests.vision_models import FAMILIES, SPELLINGS, Family, write_vision_model

TOLERANCE = 1e-4


def export(source: Path, target: Path, dialect: str, quantization: Quantization = "none") -> Path:
    chosen: Dialect = "native" if dialect == "native" else "classic"
    export_model(source, target, ExportOptions(dialect=chosen, quantization=quantization))
    return target


@pytest.mark.parametrize("chunk", [1, 5, 12])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_rows_with_and_without_an_image_agree(
    tmp_path: Path, dialect: str, family: Family, chunk: int
) -> None:
    model = write_vision_model(tmp_path / "m", family)
    compare_images(export(model, tmp_path / "engine", dialect), family, chunk, TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_base_for_speculation_agree(
    tmp_path: Path, dialect: str, family: Family
) -> None:
    folder = export_with_draft(
        write_vision_model(tmp_path / "m", family), tmp_path, dialect=dialect
    )
    assert load_config(folder).takes_tree_mask
    compare_images(folder, family, 5, TOLERANCE)


@pytest.mark.reference
@pytest.mark.parametrize("family", FAMILIES)
def test_the_stored_logits_are_those_of_transformers(tmp_path: Path, family: Family) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    live = live_logits(family, write_vision_model(tmp_path / "m", family))
    for logits, expected in zip(live, stored_logits(family), strict=True):
        np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_text_computes_what_its_integers_say(
    tmp_path: Path, dialect: str, quantization: Quantization
) -> None:
    source = write_vision_model(tmp_path / "m", "qwen3_vl")
    folder = export(source, tmp_path / "engine", dialect, quantization)
    assert (folder / VISION_FOLDER).is_dir()
    config, model = load_config(folder), load_model_config(source)
    weights = RoundedWeights(Checkpoint(source, text_name), config)
    seen = logits_of(GraphDriver(folder, ROWS, CAPACITY), "qwen3_vl", 12)
    for row, logits, exact in zip(
        image_rows("qwen3_vl"), seen, stored_logits("qwen3_vl"), strict=True
    ):
        embeds = weights.embed(EMBEDDING, row.token_ids)
        embeds[row.seen] = row.embeds[row.seen]
        rotary = rotary_rows(config.rope_config, row.positions)
        expected = decode(model, weights, embeds, rotary, list(row.features))
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)
        assert np.abs(expected - exact).max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_are_one_model(tmp_path: Path, family: Family) -> None:
    models, names = [], []
    for spelling in SPELLINGS:
        folder = write_vision_model(tmp_path / spelling, family, spelling)
        model = load_model_config(folder)
        checkpoint = Checkpoint(folder, text_name)
        check_tensors(checkpoint, model)
        models.append(structs.replace(model, images=None))
        names.append({name for name in checkpoint.names if not is_vision_tensor(name)})
        assert model.images is not None
        assert model.images.name == family
    assert models[0] == models[1]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.merger.norm.weight", "model.visual.merger.norm.weight"),
    ],
)
def test_tensors_of_text_in_every_spelling(stored: str, name: str) -> None:
    assert text_name(stored) == name
    assert is_vision_tensor(stored) == ("visual" in stored)


def test_what_the_engine_is_told(tmp_path: Path) -> None:
    folder = export(write_vision_model(tmp_path / "m", "qwen3_vl"), tmp_path / "e", "classic")
    config = load_config(folder)
    assert (config.architecture, config.image_token_id) == ("qwen3_vl", 5)
    assert (config.num_deepstack_features, config.use_context_dependent_rope) == (2, True)
    assert config.rope_config == RopeConfig(
        type="mrope", mrope_section=(4, 2, 2), mrope_interleaved=True
    )
    assert "vision_start" in (folder / "chat_template.jinja").read_text()
    data = (folder / VISION_FOLDER / VISION_CONFIG_FILE).read_bytes()
    vision = msgspec.json.decode(data, type=VisionConfig)
    assert vision.tokens.image == config.image_token_id
    assert vision.num_deepstack_features == config.num_deepstack_features


def test_images_may_be_counted_as_text_is(tmp_path: Path) -> None:
    model = load_model_config(write_vision_model(tmp_path / "m", "idefics3"))
    assert (model.architecture, model.rope.type, model.image_token_id) == ("llama", "default", 4)
    assert not model.rope_per_row


def change(folder: Path, part: str | None, **fields: Any) -> Path:
    """Change fields of config.json, or of a part of it; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    place = config[part] if part else config
    place |= fields
    for name in [name for name, value in place.items() if value is None]:
        del place[name]
    path.write_text(json.dumps(config))
    return folder


# What SmolVLM and Qwen2.5-VL say beside what is read, as published.
@pytest.mark.parametrize(
    ("family", "part", "fields"),
    [
        (
            "idefics3",
            "text_config",
            {
                "_flash_attn_2_enabled": True,
                "architectures": ["VLlama3ForCausalLM"],
                "is_llama_config": True,
                "neftune_noise_alpha": 0.0,
                "perceiver_config": {"model_type": "vllama3", "resampler_depth": 6},
                "pixel_shuffle_factor": 2,
                "qk_layer_norms": False,
                "rope_interleaved": False,
                "use_resampler": False,
            },
        ),
        (
            "idefics3",
            None,
            {"image_seq_len": 81, "transformers.js_config": {"dtype": "q4"}, "use_cache": True},
        ),
        (
            "qwen2_5_vl",
            None,
            {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 70},
        ),
    ],
)
def test_what_published_configurations_also_say(
    tmp_path: Path, family: Family, part: str | None, fields: dict[str, Any]
) -> None:
    folder = write_vision_model(tmp_path / "m", family)
    plain = load_model_config(folder)
    assert load_model_config(change(folder, part, **fields)) == plain


def test_the_outer_word_on_a_tied_head_counts(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "m", "qwen3_vl")
    assert load_model_config(folder).tied_head
    change(folder, "text_config", tie_word_embeddings=True)
    assert not load_model_config(change(folder, None, tie_word_embeddings=False)).tied_head
    assert load_model_config(change(folder, None, tie_word_embeddings=None)).tied_head


@pytest.mark.reference
@pytest.mark.parametrize("model_type", IMAGE_FAMILIES)
def test_what_is_left_out_is_what_transformers_takes(model_type: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    text = {"idefics3": "llama", "smolvlm": "llama"}.get(model_type, f"{model_type}_text")
    model = transformers.AutoConfig.for_model(model_type, text_config={"model_type": text})
    for name, value in IMAGE_FAMILIES[model_type].defaults.items():
        assert getattr(model.text_config, name) == value


ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2]}


@pytest.mark.parametrize(
    ("code", "field", "part", "fields"),
    [
        ("model_unsupported", "architectures", None, {"architectures": ["Qwen3VLModel"]}),
        ("model_unsupported", "logits_scaling", "text_config", {"logits_scaling": 2.0}),
        ("model_unsupported", "use_resampler", None, {"use_resampler": True}),
        ("model_invalid", "image_token_id", None, {"image_token_id": None}),
        ("model_invalid", "image_token_id", None, {"image_token_id": 320}),
        ("model_invalid", "vision_config", None, {"vision_config": None}),
        ("model_invalid", "rope_theta", "text_config", {"rope_theta": None}),
        ("model_invalid", "mrope_section", "text_config", {"rope_scaling": None}),
        (
            "model_invalid",
            "mrope_section",
            "text_config",
            {"rope_scaling": {**ROPE, "mrope_section": [4, 4]}},
        ),
        (
            "model_invalid",
            "mrope_section",
            "text_config",
            {"rope_scaling": {**ROPE, "mrope_section": [4, 2, 3]}},
        ),
        (
            "model_unsupported",
            "mrope_interleaved",
            "text_config",
            {"rope_scaling": {**ROPE, "mrope_interleaved": False}},
        ),
        (
            "model_unsupported",
            "rope_type",
            "text_config",
            {"rope_scaling": {**ROPE, "rope_type": "linear", "factor": 2.0}},
        ),
        (
            "model_invalid",
            "deepstack_visual_indexes",
            "vision_config",
            {"deepstack_visual_indexes": [0, 1, 2, 3]},
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, code: str, field: str, part: str | None, fields: dict[str, Any]
) -> None:
    folder = write_vision_model(tmp_path / "m", "qwen3_vl")
    with pytest.raises(HearthError) as caught:
        load_model_config(change(folder, part, **fields))
    assert (caught.value.code, caught.value.field) == (code, field)


def test_a_tokenizer_must_have_the_image_token(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "m", "idefics3", text={"vocab_size": 400})
    change(folder, None, image_token_id=399)
    with pytest.raises(HearthError, match="lacks the model's image token 399") as caught:
        export(folder, tmp_path / "engine", "classic")
    assert caught.value.code == "tokenizer_mismatch"


FEATURES = 2
MROPE = RopeConfig(type="mrope", mrope_section=(6, 4, 2), mrope_interleaved=True)


def taking_images(source: Path, folder: Path, options: ExportOptions) -> ModelConfig:
    """Make an engine folder of a text model as if it took images; the model of it."""
    model = load_model_config(source)
    rope = structs.replace(MROPE, theta=model.rope.theta)
    model = structs.replace(model, rope=rope)
    config = structs.replace(
        export_model(source, folder, options),
        rope_config=rope,
        use_context_dependent_rope=True,
        image_token_id=5,
        num_deepstack_features=FEATURES,
        files={},
    )

    def build(graph: GraphBuilder, dialect: GraphDialect, weights: Weights) -> None:
        Decoder(graph, dialect, weights, deepstack=FEATURES).build()

    write_onnx(
        folder,
        model,
        config,
        Weights(Checkpoint(source), config),
        build=build,
        written=lambda _: None,
    )
    write_config(folder, config)
    return model


@pytest.fixture
def engine(tmp_path: Path, dialect: str) -> tuple[Path, ModelConfig]:
    """An engine folder and its model."""
    options = ExportOptions(dialect="native" if dialect == "native" else "classic")
    model = taking_images(reference_folder("qwen3_untied"), tmp_path / "engine", options)
    return tmp_path / "engine", model


def test_text_alone_has_the_logits_of_the_text_model(engine: tuple[Path, ModelConfig]) -> None:
    for row in reference_logits("qwen3_untied"):
        (logits,) = run_rows(GraphDriver(engine[0], 1, capacity=32), [row], 5)
        np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


def test_rows_turn_by_their_own_tables_and_add_their_own_features(
    engine: tuple[Path, ModelConfig],
) -> None:
    folder, model = engine
    random = np.random.default_rng(7)
    ids = random.integers(0, model.vocab_size, (3, 9))
    turns = random.uniform(0, 20, (3, 32, model.rotary_dim // 2)).astype(np.float32)
    features = random.normal(0, 1, (FEATURES, 3, 9, model.hidden_size)).astype(np.float32)
    driver = GraphDriver(folder, 3, capacity=32)
    driver.rope = {"rope_cos": np.cos(turns), "rope_sin": np.sin(turns)}
    seen = []
    for start in range(0, 9, 4):
        piece = slice(start, start + 4)
        count = len(ids[0, piece])
        steps = np.tile(np.arange(count), (3, 1))
        more = {f"deepstack_embeds_{k}": one[:, piece] for k, one in enumerate(features)}
        driver.outputs = driver.run(ids[:, piece], steps + driver.filled[:, None], steps, **more)
        driver.commit([count] * 3)
        seen.append(driver.outputs["logits"])
    own = turns[:, None, :9]
    weights = RoundedWeights(Checkpoint(reference_folder("qwen3_untied")), driver.config)
    embeds: NDArray[np.float32] = driver.table[ids].astype(np.float32)
    expected = decode(model, weights, embeds, (np.cos(own), np.sin(own)), list(features))
    np.testing.assert_allclose(np.concatenate(seen, axis=1), expected, atol=TOLERANCE, rtol=0)
    plain = rope_tables(model.rope, model.rotary_dim, 9)
    assert np.abs(decode(model, weights, embeds, plain, list(features)) - expected).max() > 0.1
