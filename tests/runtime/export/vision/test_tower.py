"""Towers: the graph against transformers, the reference, and the known answer made of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir
import onnxruntime as ort
import pytest
from msgspec import json, structs
from numpy.typing import NDArray

from hearth.runtime.engine_folder import ANSWER_FILE, MODEL_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.options import Dialect, ExportOptions, PlanOptions, TargetType
from hearth.runtime.export.reference_pass import RoundedWeights
from hearth.runtime.export.vision import write
from hearth.runtime.export.vision.layout import without_model
from hearth.runtime.export.vision.tower_model import load_tower
from hearth.runtime.export.vision.write import reference_outputs, write_vision
from hearth.runtime.tensors.registry import build_registry_for_tower, tower_outputs
from hearth.runtime.tower_answer import (
    MIXES,
    TowerAnswer,
    answer_pictures,
    load_tower_answer,
    mixed,
)
from hearth.runtime.vision.tower_inputs import Segment, segments_of, tower_inputs
from hearth.runtime.vision_config import VISION_FOLDER, VisionConfig
from tests.references.towers import GRIDS, live_outputs, patches_of, stored_outputs
from tests.runtime.export.hugging_face import change_tensors
from tests.vision_models import FAMILIES, SPELLINGS, Family, Spelling, write_vision_model

Array = NDArray[Any]


def random_patches(config: VisionConfig, segments: Sequence[Segment], seed: int = 0) -> Array:
    """Patches [T, patch bytes] of noise for all segments."""
    count = sum(segment.patches for segment in segments)
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, config.patch_bytes), np.uint8)


def run_tower(
    folder: Path, config: VisionConfig, segments: Sequence[Segment], patches: Array
) -> dict[str, Array]:
    """All outputs of the graph in a folder `visual`, by name."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(folder / MODEL_FILE, options, providers=["CPUExecutionProvider"])
    registry = build_registry_for_tower(config)
    inputs = {
        spec.name: tower_inputs(segments, config)[spec.name].astype(spec.dtype)
        for spec in registry.specs
        if spec.direction == "input" and spec.name != "patches"
    }
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"patches": patches, **inputs}), strict=True))


TOLERANCE = 1e-4


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_transformers(
    tmp_path: Path, family: Family, spelling: Spelling, dialect: Dialect
) -> None:
    source = write_vision_model(tmp_path / "m", family, spelling)
    config = write_vision(source, tmp_path, ExportOptions(dialect=dialect))
    assert config is not None
    segments = [Segment(height, width) for t, height, width in GRIDS[family] for _ in range(t)]
    given = run_tower(tmp_path / VISION_FOLDER, config, segments, patches_of(family))
    wanted = stored_outputs(family)
    assert set(given) == set(wanted)
    assert len(given) == 1 + config.num_deepstack_features
    for name, values in wanted.items():
        assert values.std() > 0.1
        np.testing.assert_allclose(given[name], values, atol=TOLERANCE, rtol=0)


@pytest.mark.reference
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_stored_outputs_are_those_of_the_installed_transformers(
    tmp_path: Path, family: Family, spelling: Spelling
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    live = live_outputs(tmp_path / "m", family, spelling)
    wanted = stored_outputs(family)
    assert set(live) == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(live[name], values, atol=1e-5, rtol=0)


SEGMENTS = [Segment(4, 6), Segment(10, 6), Segment(2, 2)]


def exported(
    source: Path, folder: Path, dtype: TargetType = "float32"
) -> tuple[Path, VisionConfig, TowerAnswer]:
    folder.mkdir()
    config = write_vision(source, folder, ExportOptions(dialect="classic", dtype=dtype))
    assert config is not None
    folder /= VISION_FOLDER
    return folder, config, load_tower_answer(folder, config)


def answered(folder: Path, config: VisionConfig) -> list[Array]:
    """What the graph makes of each picture."""
    out = []
    for patches, layout in answer_pictures(config):
        given = run_tower(folder, config, segments_of(layout), patches)
        out.append(np.stack([given[name] for name in tower_outputs(config)]))
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_computes_what_the_graph_computes(tmp_path: Path, family: Family) -> None:
    source = write_vision_model(tmp_path / "m", family, "saved")
    folder, config, _ = exported(source, tmp_path / "engine")
    tower = load_tower(source, ExportOptions(dialect="classic"))
    assert tower is not None
    patches = random_patches(config, SEGMENTS)
    weights = RoundedWeights(Checkpoint(source, without_model), config)
    wanted = reference_outputs(tower, weights, patches, SEGMENTS)
    given = run_tower(folder, config, SEGMENTS, patches)
    assert len(wanted) == len(given) == 1 + config.num_deepstack_features
    for name, values in zip(tower_outputs(config), wanted, strict=True):
        np.testing.assert_allclose(given[name], values, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_gives_the_answer_and_a_changed_one_does_not(
    tmp_path: Path, family: Family, dtype: TargetType
) -> None:
    source = write_vision_model(tmp_path / "m", family, vision={"hidden_act": _plain(family)})
    folder, config, answer = exported(source, tmp_path / "engine", dtype)
    assert ANSWER_FILE in config.files
    report = answer.compare(answered(folder, config))
    tokens = sum(layout.tokens for _, layout in answer_pictures(config))
    assert report.compared == (1 + config.num_deepstack_features) * tokens * MIXES
    assert report.error < 0.5
    change_tensors(source, _swap_patch_colours)
    changed, config, _ = exported(source, tmp_path / "changed", dtype)
    with pytest.raises(HearthError) as error:
        answer.compare(answered(changed, config))
    assert error.value.code == "wrong_answer"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_that_a_plan_is_made_of_gives_the_answer(
    tmp_path: Path, family: Family, dtype: TargetType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "build_or_fall_back", lambda _folder, config, *_: config)
    source = write_vision_model(tmp_path / "m", family)
    options = ExportOptions(dialect="classic", dtype=dtype, plan=PlanOptions())
    config = write_vision(source, tmp_path, options)
    assert config is not None
    folder = tmp_path / VISION_FOLDER
    assert b"LayerNormalization" not in (folder / MODEL_FILE).read_bytes()
    assert load_tower_answer(folder, config).compare(answered(folder, config)).error < 0.5


def _plain(family: Family) -> str:
    return "silu" if family == "qwen2_5_vl" else "gelu"


def _swap_patch_colours(tensors: dict[str, Array]) -> None:
    (name,) = (name for name in tensors if "patch_embed" in name and name.endswith("weight"))
    tensors[name] = tensors[name][:, ::-1].copy()


def test_numbers_that_are_not_finite_are_wrong() -> None:
    answer = TowerAnswer(mixes=(((0.0,) * MIXES,),), tolerances=(1.0,))
    with pytest.raises(HearthError, match="embeddings"):
        answer.compare([np.full((1, 1, 4), np.nan, np.float32)])


def test_mixes_tell_embeddings_apart() -> None:
    random = np.random.default_rng(0)
    embeddings = random.standard_normal((100, 64)).astype(np.float32)
    sums = mixed(embeddings)
    assert sums.shape == (100, MIXES)
    assert 0.8 < sums.std() < 1.2
    assert np.abs(np.corrcoef(sums.T) - np.eye(MIXES)).max() < 0.5


@pytest.mark.parametrize("change", ["mixes", "tolerances", "text"])
def test_a_damaged_answer_is_refused(tmp_path: Path, change: str) -> None:
    source = write_vision_model(tmp_path / "m", "qwen3_vl")
    folder, config, answer = exported(source, tmp_path / "engine")
    damaged = {
        "mixes": json.encode(structs.replace(answer, mixes=answer.mixes[:1])),
        "tolerances": json.encode(structs.replace(answer, tolerances=(0.0, 1.0, 1.0))),
        "text": b"{}",
    }
    (folder / ANSWER_FILE).write_bytes(damaged[change])
    with pytest.raises(HearthError) as error:
        load_tower_answer(folder, config)
    assert (error.value.code, error.value.field) == ("engine_corrupt", f"visual/{ANSWER_FILE}")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_of_16_bits_may_come_out_in_the_decoders_type(
    tmp_path: Path, family: Family
) -> None:
    source = write_vision_model(tmp_path / "m", family, vision={"hidden_act": _plain(family)})
    folder, config, _ = exported(source, tmp_path / "engine", "float16")
    beside = tmp_path / "beside"
    beside.mkdir()
    options = ExportOptions(
        dialect="classic", dtype="bfloat16", backend="onnxruntime", device="cuda"
    )
    made = write_vision(source, beside, options)
    assert made is not None
    assert (made.dtype, made.embedding_dtype) == ("float16", "bfloat16")
    graph = onnx_ir.load(beside / VISION_FOLDER / MODEL_FILE).graph
    assert {one.dtype for one in graph.outputs} == {onnx_ir.DataType.BFLOAT16}
    answer = load_tower_answer(beside / VISION_FOLDER, made)
    given = [one.astype(ml_dtypes.bfloat16) for one in answered(folder, config)]
    assert answer.compare(given).error < 0.5
