import json
import sys
from pathlib import Path

import pytest
from msgspec import structs

from bench.gpu_cases import (
    GPU_CASES,
    engine_folder,
    export_options,
    random_source,
    step_bytes,
)
from runtime.config import load_config
from runtime.export import ExportOptions
from runtime.memory.sizes import projection_bytes
from tests.runtime.engine_configs import small_config


def nothing(stage: str, done: int, total: int) -> None:
    assert stage
    assert 0 <= done <= total


def test_the_cases_are_two_models_at_two_batch_sizes() -> None:
    assert list(GPU_CASES) == ["0.6b/b1", "0.6b/b8", "4b/b1", "4b/b8"]
    assert GPU_CASES["4b/b8"].batch == 8


def test_engines_are_exported_for_the_gpu_and_for_both_batches() -> None:
    onnx = export_options("ort-cuda", "float16", sys.executable)
    assert (onnx.device, onnx.plan, onnx.max_batch, onnx.capacity) == ("cuda", None, 8, 1024)
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
