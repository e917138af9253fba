"""The folder `visual` and the files of its processor: what is checked, read and refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from hearth.runtime.engine_folder import ANSWER_FILE, DATA_FILE, MODEL_FILE, verify_folder
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.engine_executor import check_bindings
from hearth.runtime.executor.onnx_engine import OnnxEngine
from hearth.runtime.export.options import Dialect, ExportOptions
from hearth.runtime.export.vision.tower_model import load_tower
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.tensors.registry import build_registry_for_tower
from hearth.runtime.tower_answer import answer_pictures
from hearth.runtime.vision_config import VISION_FOLDER, ImageRules, load_vision_config
from tests.references import reference_folder
from tests.runtime.export.hugging_face import change_tensors
from tests.vision_models import FAMILIES, SPELLINGS, Family, Spelling, write_vision_model

CLASSIC = ExportOptions(dialect="classic")


def test_a_text_model_has_no_tower(tmp_path: Path) -> None:
    assert write_vision(reference_folder("qwen3"), tmp_path, CLASSIC) is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HearthError, match="no vision tower") as error:
        write_vision(reference_folder("qwen3"), tmp_path, replace(CLASSIC, max_patches=64))
    assert (error.value.code, error.value.field) == ("unsupported_option", "max_patches")


def test_the_largest_call_is_of_whole_tokens_and_of_any_picture(tmp_path: Path) -> None:
    source = write_vision_model(tmp_path / "m", "idefics3")
    for asked, made in ((0, 4096), (48, 48), (49, 52)):
        tower = load_tower(source, replace(CLASSIC, max_patches=asked))
        assert tower is not None
        assert tower.config.max_patches == made
        assert all(layout.patches <= made for _, layout in answer_pictures(tower.config))
    with pytest.raises(HearthError, match="at least 48") as error:
        load_tower(source, replace(CLASSIC, max_patches=47))
    assert (error.value.code, error.value.field) == ("invalid_value", "max_patches")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_has_bindings_of_the_registry_and_digests(
    tmp_path: Path, family: Family, dialect: Dialect
) -> None:
    source = write_vision_model(tmp_path / "m", family)
    config = write_vision(source, tmp_path, ExportOptions(dialect=dialect))
    assert config is not None
    assert load_vision_config(tmp_path) == config
    assert (config.family, config.dialect, config.head_dim) == (family, dialect, 16)
    assert set(config.files) == {MODEL_FILE, DATA_FILE, ANSWER_FILE}
    folder = tmp_path / VISION_FOLDER
    verify_folder(folder, config, digests=True)
    engine = OnnxEngine.open(folder, config, EngineOptions(threads=1))
    registry = build_registry_for_tower(config)
    assert {tensor.name for tensor in engine.io_tensors} == {spec.name for spec in registry.specs}
    check_bindings(engine.io_tensors, registry)
    engine.close()
    data = folder / DATA_FILE
    content = data.read_bytes()
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(HearthError, match="changed after the export") as error:
        verify_folder(folder, config, digests=True)
    assert (error.value.code, error.value.field) == ("engine_corrupt", DATA_FILE)


def test_tokens_and_rotation_follow_from_the_model(tmp_path: Path) -> None:
    known = {
        family: write_vision(
            write_vision_model(tmp_path / family, family), tmp_path / family, CLASSIC
        )
        for family in FAMILIES
    }
    for config in known.values():
        assert config is not None
    qwen, older, idefics = known.values()
    assert qwen is not None
    assert older is not None
    assert idefics is not None
    for tokens in (qwen.tokens, older.tokens):
        assert (tokens.vision_start, tokens.vision_end, tokens.image, tokens.video) == (3, 4, 5, 6)
    assert idefics.tokens.image == 4
    assert (idefics.tokens.fake_around, idefics.tokens.global_image) == (3, 5)
    assert (qwen.position_side, qwen.deepstack_layers) == (6, (0, 2))
    assert (older.window_size, older.full_attention_layers) == (32, (1, 3))
    assert older.tokens_per_second == 2
    assert (idefics.position_side, idefics.merge_size, idefics.temporal_patch_size) == (4, 2, 1)


@pytest.mark.parametrize(
    ("family", "change", "code", "field"),
    [
        ("qwen3_vl", {"hidden_size": 24}, "model_unsupported", "hidden_size"),
        ("qwen3_vl", {"hidden_size": 40}, "model_unsupported", "hidden_size"),
        ("qwen3_vl", {"hidden_size": 33}, "model_invalid", "hidden_size"),
        ("qwen3_vl", {"hidden_act": "relu"}, "model_unsupported", "hidden_act"),
        ("qwen3_vl", {"num_position_embeddings": 35}, "model_invalid", "num_position_embeddings"),
        ("qwen3_vl", {"deepstack_visual_indexes": [2, 0]}, "model_invalid",
         "deepstack_visual_indexes"),
        ("qwen3_vl", {"out_hidden_size": 32}, "model_invalid", "out_hidden_size"),
        ("qwen3_vl", {"in_channels": 1}, "model_unsupported", "in_channels"),
        ("qwen3_vl", {"use_head": True}, "model_unsupported", "use_head"),
        ("qwen3_vl", {"rope_parameters": {"rope_theta": 5}}, "model_unsupported",
         "rope_parameters"),
        ("qwen2_5_vl", {"window_size": 40}, "model_unsupported", "window_size"),
        ("qwen2_5_vl", {"window_size": 528}, "model_unsupported", "window_size"),
        ("qwen2_5_vl", {"fullatt_block_indexes": "all"}, "model_invalid",
         "fullatt_block_indexes"),
        ("idefics3", {"layer_norm_eps": 0}, "model_invalid", "layer_norm_eps"),
    ],
    ids=str,
)  # fmt: skip
def test_a_tower_that_is_refused(
    tmp_path: Path, family: Family, change: dict[str, Any], code: str, field: str
) -> None:
    source = write_vision_model(tmp_path / "m", family)
    path = source / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(HearthError) as error:
        write_vision(source, tmp_path, CLASSIC)
    assert (error.value.code, error.value.field) == (code, field)


def test_another_family_is_refused(tmp_path: Path) -> None:
    source = write_vision_model(tmp_path / "m", "qwen3_vl")
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "llava"}))
    with pytest.raises(HearthError, match="qwen2_5_vl") as error:
        write_vision(source, tmp_path, CLASSIC)
    assert (error.value.code, error.value.field) == ("model_unsupported", "model_type")


@pytest.mark.parametrize("kind", ["missing", "spare", "shape"])
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, kind: str) -> None:
    source = write_vision_model(tmp_path / "m", "idefics3")
    name = "model.vision_model.post_layernorm.bias"

    def change(tensors: dict[str, NDArray[Any]]) -> None:
        if kind == "missing":
            del tensors[name]
        elif kind == "shape":
            tensors[name] = np.zeros(31, np.float32)
        else:
            tensors["model.vision_model.head.weight"] = np.zeros((2, 2), np.float32)

    change_tensors(source, change)
    with pytest.raises(HearthError) as error:
        write_vision(source, tmp_path, CLASSIC)
    wanted = "vision_model.head.weight" if kind == "spare" else name.removeprefix("model.")
    assert error.value.field == wanted
    assert error.value.code == ("model_unsupported" if kind == "spare" else "model_invalid")


def test_a_tokenizer_without_the_tokens_is_refused(tmp_path: Path) -> None:
    source = write_vision_model(tmp_path / "m", "idefics3")
    path = source / "tokenizer.json"
    path.write_text(path.read_text().replace("<global-img>", "<global_img>"))
    with pytest.raises(HearthError, match="<global-img>") as error:
        write_vision(source, tmp_path, CLASSIC)
    assert error.value.code == "tokenizer_mismatch"


def test_a_tile_may_have_more_pixels_than_its_patches(tmp_path: Path) -> None:
    source = write_vision_model(tmp_path / "m", "idefics3", vision={"image_size": 37})
    config = write_vision(source, tmp_path, CLASSIC)
    assert config is not None
    assert load_vision_config(tmp_path) == config
    assert (config.rules.tile_size, config.position_side) == (37, 4)


ODD_TILE = {"max_image_size": {"longest_edge": 40}}
RESAMPLES = {"bicubic": 3, "bilinear": 2, "lanczos": 1}


def rules_of(folder: Path) -> ImageRules:
    tower = load_tower(folder, ExportOptions(dialect="classic"))
    assert tower is not None
    return tower.config.rules


@pytest.mark.reference
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rules_are_those_of_transformers(
    tmp_path: Path, family: Family, spelling: Spelling
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    folder = write_vision_model(tmp_path / "m", family, spelling)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    rules = rules_of(folder)
    assert list(rules.mean) == list(processor.image_mean)
    assert list(rules.std) == list(processor.image_std)
    assert rules.scale == processor.rescale_factor
    assert RESAMPLES[rules.resample] == processor.resample
    size = processor.size
    if family == "idefics3":
        assert rules.longest_edge == size["longest_edge"]
        assert rules.tile_size == processor.max_image_size["longest_edge"]
        assert rules.splits == processor.do_image_splitting
    else:
        assert (rules.min_pixels, rules.max_pixels) == (size["shortest_edge"], size["longest_edge"])


def test_rules_of_videos(tmp_path: Path) -> None:
    known = {
        (family, spelling): rules_of(
            write_vision_model(tmp_path / family / spelling, family, spelling)
        )
        for family in FAMILIES
        for spelling in SPELLINGS
    }
    for rules in (known["qwen3_vl", "published"], known["qwen3_vl", "saved"]):
        assert (rules.video_min_pixels, rules.video_max_pixels) == (2048, 131_072)
        assert (rules.fps, rules.min_frames, rules.max_frames) == (2, 4, 16)
    # As published there is one file for both, and frames are taken as they come.
    older, newer = known["qwen2_5_vl", "published"], known["qwen2_5_vl", "saved"]
    assert (older.video_max_pixels, newer.video_max_pixels) == (65_536, 131_072)
    assert older.fps == newer.fps == 0
    assert known["idefics3", "published"].video_longest_edge == 32
    assert known["idefics3", "saved"].video_longest_edge == 128
    for rules in (known["idefics3", "published"], known["idefics3", "saved"]):
        assert (rules.fps, rules.max_frames) == (1, 8)


@pytest.mark.parametrize(
    "change",
    [
        {"min_pixels": 3136, "max_pixels": 50_176, "size": {"shortest_edge": 1, "longest_edge": 2}},
        {"size": {"min_pixels": 3136, "max_pixels": 50_176}},
        {"size": {"shortest_edge": 3136, "longest_edge": 50_176}},
    ],
)
def test_pixels_go_by_any_name(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write_vision_model(tmp_path / "m", "qwen3_vl")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    rules = rules_of(folder)
    assert (rules.min_pixels, rules.max_pixels) == (3136, 50_176)


@pytest.mark.parametrize(
    ("family", "change", "code", "field"),
    [
        ("qwen3_vl", {"do_resize": False}, "model_unsupported", "do_resize"),
        ("qwen3_vl", {"patch_size": 14}, "model_unsupported", "patch_size"),
        ("qwen3_vl", {"resample": 0}, "model_invalid", "resample"),
        ("qwen3_vl", {"resample": 5}, "model_unsupported", "resample"),
        ("qwen3_vl", {"image_mean": [1, 2]}, "model_invalid", "image_mean"),
        ("qwen3_vl", {"image_std": [1, 0, 1]}, "model_invalid", "image_std"),
        ("qwen2_5_vl", {"min_pixels": 1 << 20}, "model_invalid", "min_pixels"),
        ("idefics3", ODD_TILE, "model_unsupported", "max_image_size"),
    ],
    ids=str,
)  # fmt: skip
def test_a_processor_that_is_refused(
    tmp_path: Path, family: Family, change: dict[str, Any], code: str, field: str
) -> None:
    folder = write_vision_model(tmp_path / "m", family)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(HearthError) as error:
        load_tower(folder, ExportOptions(dialect="classic"))
    assert (error.value.code, error.value.field) == (code, field)


def test_a_model_without_its_processor_is_refused(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "m", "qwen3_vl")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(HearthError, match=r"preprocessor_config\.json") as error:
        load_tower(folder, ExportOptions(dialect="classic"))
    assert error.value.code == "model_invalid"
