"""Processor files of any age, as transformers reads them and as they are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.export.options import ExportOptions
from hearth.runtime.export.vision.tower_model import load_tower
from hearth.runtime.vision_config import ImageRules
from tests.vision_models import FAMILIES, SPELLINGS, Family, Spelling, write_vision_model

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
def test_what_is_refused(
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
