import json
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from safetensors import safe_open

from hearth.bench.decode import cases
from hearth.bench.decode.cases import (
    CASES,
    Artifacts,
    chosen_cases,
    engine_folder,
    export_options,
    prepare,
    random_source,
    step_bytes,
    weight_bytes,
)
from hearth.runtime.config import load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions
from hearth.runtime.memory.sizes import projection_bytes
from tests.runtime.engine_configs import small_config


def nothing(stage: str, done: int, total: int) -> None:
    assert stage
    assert 0 <= done <= total


def float_bytes(source: Path) -> int:
    total = 0
    for path in source.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                total += 4 * int(np.prod(file.get_slice(name).get_shape()))
    return total


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def prepared(cache: Path, name: str) -> Artifacts:
    return prepare(CASES[name], cache, nothing, quick=True)


def test_a_float_step_reads_every_weight_once(cache: Path) -> None:
    found = prepared(cache, "0.6b/fp32")
    # Beside the weights the graph holds a few constants of shapes and masks.
    assert float_bytes(found.source) <= found.weight_bytes < 1.02 * float_bytes(found.source)


def test_quantised_steps_read_less(cache: Path) -> None:
    sizes = [prepared(cache, f"0.6b/{kind}").weight_bytes for kind in ("fp32", "int8", "int4")]
    # So small a model keeps an int8 head beside int4.
    assert sizes[0] > 3 * sizes[1] > 4 * sizes[2]


def test_the_second_time_everything_is_there(cache: Path) -> None:
    first = prepared(cache, "0.6b/fp32")
    written = first.engine.stat().st_mtime_ns
    assert prepared(cache, "0.6b/fp32") == first
    assert first.engine.stat().st_mtime_ns == written
    assert first.weight_bytes == weight_bytes(first.engine)


def test_a_changed_exporter_replaces_the_engine(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(cache, "0.6b/int8")
    monkeypatch.setattr(cases, "made_digest", lambda *_: "another")
    second = prepared(cache, "0.6b/int8")
    assert second.engine.name == "quick-int8-another"
    assert not first.engine.exists()


def test_without_the_converter_there_is_no_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert prepared(tmp_path, "0.6b/fp32").gguf is None


def test_an_absent_shipped_model_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "SOURCE", tmp_path / "home")
    with pytest.raises(HearthError) as caught:
        chosen_cases(["tiny/fp32"])
    assert caught.value.code == "engine_missing"
    assert chosen_cases(["0.6b/int8"]) == [CASES["0.6b/int8"]]
    assert [case.model for case in chosen_cases([])] == ["0.6b"] * 3
    assert "its case is left out" in capsys.readouterr().err


def test_the_shipped_model_is_read_where_it_lies(
    quick_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "SOURCE", quick_model)
    found = prepared(tmp_path, "tiny/fp32")
    assert found.source == quick_model
    assert json.loads((found.engine / "config.json").read_text())["max_supported_batch_size"] == 1


def test_engines_are_exported_for_the_gpu_and_for_both_batches() -> None:
    onnx = export_options("ort-cuda", "float16", sys.executable)
    assert (onnx.device, onnx.plan, onnx.max_batch, onnx.capacity) == ("cuda", None, 8, 2048)
    ours = export_options("kernels", "bfloat16", sys.executable)
    assert (ours.engine, ours.device, ours.dtype) == ("kernels", "cuda", "bfloat16")
    assert (ours.quantization, ours.max_batch, ours.capacity) == ("none", 8, 2048)
    for bits in ("int8", "int4"):
        fewer = export_options(f"kernels-{bits}", "float16", sys.executable)  # type: ignore[arg-type] # an engine
        assert (fewer.engine, fewer.quantization) == ("kernels", bits)
    plan = export_options("tensorrt", "float16", "/somewhere/python").plan
    assert plan is not None
    assert (plan.python, plan.version_compatible) == ("/somewhere/python", True)
    assert plan.decode_batches == (1, 8)


def test_a_source_and_a_folder_are_made_once(tmp_path: Path) -> None:
    source = random_source("0.6b", tmp_path, nothing, quick=True)
    assert json.loads((source / "config.json").read_text())["num_hidden_layers"] == 2
    options = ExportOptions(capacity=64)
    first = engine_folder(source, tmp_path, options, nothing)
    written = first.stat().st_mtime_ns
    assert random_source("4b", tmp_path, nothing, quick=True) == source
    assert engine_folder(source, tmp_path, options, nothing) == first
    assert first.stat().st_mtime_ns == written


def test_other_options_make_another_folder(tmp_path: Path) -> None:
    source = random_source("0.6b", tmp_path, nothing, quick=True)
    folders = [
        engine_folder(source, tmp_path, ExportOptions(capacity=capacity), nothing)
        for capacity in (64, 96)
    ]
    assert load_config(folders[1]).max_kv_cache_capacity == 96
    assert not folders[0].exists()


def test_a_step_reads_the_weights_once_and_each_row_its_own_cache() -> None:
    config = small_config()
    weights = projection_bytes(config)
    slot = 2 * 2 * 1 * 8 * 4
    assert step_bytes(config, 1, 0) == weights
    assert step_bytes(config, 4, 10) == weights + 4 * 10 * slot
    half = structs.replace(config, kv_cache_dtype="float16")
    assert step_bytes(half, 4, 10) == pytest.approx(weights + 2 * 10 * slot)
