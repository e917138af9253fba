from importlib.resources import files
from typing import Literal

import pytest
from msgspec import structs

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import MOST_GPU_ROWS
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.generation.deployment import effective_config
from hearth.runtime.options import RuntimeOptions

SIMULATED = simulated_config(max_batch=8, capacity=1000, prefill_chunk=128, step_ms=3)
STORED = structs.replace(SIMULATED, backend="onnxruntime", hidden_size=64, step_ms=0)


def test_without_options_the_folder_decides() -> None:
    assert effective_config(STORED, RuntimeOptions()) == STORED


def test_smaller_limits_are_honoured() -> None:
    config = effective_config(STORED, RuntimeOptions(max_batch=2, capacity=100))
    assert (config.max_supported_batch_size, config.max_kv_cache_capacity) == (2, 100)
    assert (config.max_supported_input_length, config.prefill_chunk) == (99, 100)
    trees = structs.replace(STORED, max_verify_tree_size=128, max_draft_tree_size=128)
    small = effective_config(trees, RuntimeOptions(capacity=100))
    assert (small.max_verify_tree_size, small.max_draft_tree_size) == (100, 99)


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        (RuntimeOptions(max_batch=9), "invalid_value", "max_batch"),
        (RuntimeOptions(capacity=1001), "invalid_value", "capacity"),
        (RuntimeOptions(capacity=1), "invalid_value", "capacity"),
        (RuntimeOptions(threads=-1), "invalid_value", "threads"),
        (RuntimeOptions(max_batch=-1), "invalid_value", "max_batch"),
        (RuntimeOptions(step_ms=2), "unsupported_option", "step_ms"),
        (RuntimeOptions(prefill_us=2), "unsupported_option", "prefill_us"),
        (RuntimeOptions(prefill_us=-1), "invalid_value", "prefill_us"),
    ],
)
def test_an_option_is_honoured_or_refused(options: RuntimeOptions, code: str, field: str) -> None:
    with pytest.raises(HearthError) as caught:
        effective_config(STORED, options)
    assert (caught.value.code, caught.value.field) == (code, field)


@pytest.mark.parametrize(
    ("options", "field"),
    [(RuntimeOptions(threads=2), "threads"), (RuntimeOptions(spin=True), "spin")],
)
def test_settings_of_the_cpus_threads_are_refused_where_they_are_nothing(
    options: RuntimeOptions, field: str
) -> None:
    assert effective_config(STORED, options) == STORED
    plan = structs.replace(STORED, backend="tensorrt", device="cuda")
    gpu = structs.replace(STORED, device="cuda")
    for config in (SIMULATED, plan, *([gpu] if field == "spin" else [])):
        with pytest.raises(HearthError) as caught:
            effective_config(config, options)
        assert (caught.value.code, caught.value.field) == ("unsupported_option", field)


def test_a_folder_can_be_simulated() -> None:
    asked = RuntimeOptions(engine_kind="simulated", step_ms=2, prefill_us=40)
    config = effective_config(STORED, asked)
    assert (config.backend, config.hidden_size) == ("simulated", 1)
    assert (config.step_ms, config.prefill_us) == (2, 40)
    slow = structs.replace(SIMULATED, prefill_us=7.5)
    kept = effective_config(slow, RuntimeOptions())
    assert (kept.step_ms, kept.prefill_us) == (3, 7.5)


def test_a_simulated_folder_holds_no_model() -> None:
    with pytest.raises(HearthError) as caught:
        effective_config(SIMULATED, RuntimeOptions(engine_kind="onnxruntime"))
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "engine_kind")


PLAN = structs.replace(
    STORED, backend="tensorrt", device="cuda", dialect="classic", static_decode_batches=(1, 2, 4, 8)
)


def test_a_plan_serves_the_shapes_it_was_built_with() -> None:
    config = effective_config(PLAN, RuntimeOptions(max_batch=4))
    assert config.static_decode_batches == (1, 2, 4)
    assert effective_config(PLAN, RuntimeOptions()) == PLAN


@pytest.mark.parametrize(
    ("options", "field"),
    [(RuntimeOptions(max_batch=3), "max_batch"), (RuntimeOptions(capacity=999), "capacity")],
)
def test_other_shapes_of_a_plan_are_refused(options: RuntimeOptions, field: str) -> None:
    with pytest.raises(HearthError, match="the plan was built for") as caught:
        effective_config(PLAN, options)
    assert (caught.value.code, caught.value.field) == ("invalid_value", field)


def test_a_batch_beyond_a_gpus_kernels_is_refused_before_anything_is_opened() -> None:
    header = files("hearth.runtime.csrc") / "sampling" / "rows.cuh"
    assert f"#define ROWS {MOST_GPU_ROWS}\n" in header.read_text()
    many = structs.replace(STORED, max_supported_batch_size=MOST_GPU_ROWS + 1)
    assert effective_config(many, RuntimeOptions()) == many
    gpu = RuntimeOptions(device="cuda")
    with pytest.raises(HearthError, match="a GPU serves 256 rows") as caught:
        effective_config(many, gpu)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "max_batch")
    less = structs.replace(gpu, max_batch=MOST_GPU_ROWS)
    assert effective_config(many, less).max_supported_batch_size == MOST_GPU_ROWS


def test_a_graph_of_standard_operators_runs_on_either_device() -> None:
    config = effective_config(STORED, RuntimeOptions(device="cuda"))
    assert config.device == "cuda"
    assert effective_config(config, RuntimeOptions(device="cpu")) == STORED


@pytest.mark.parametrize(
    "stored",
    [
        PLAN,
        structs.replace(STORED, device="cuda", dtype="bfloat16"),
    ],
)
def test_what_a_gpu_library_made_runs_nowhere_else(stored: LLMEngineRunnerConfig) -> None:
    with pytest.raises(HearthError, match="runs on cuda alone") as caught:
        effective_config(stored, RuntimeOptions(device="cpu"))
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "device")


@pytest.mark.parametrize(("stored", "kind"), [(STORED, "tensorrt"), (PLAN, "onnxruntime")])
def test_an_engine_of_another_kind_is_refused(
    stored: LLMEngineRunnerConfig, kind: Literal["onnxruntime", "tensorrt"]
) -> None:
    with pytest.raises(HearthError) as caught:
        effective_config(stored, RuntimeOptions(engine_kind=kind))
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "engine_kind")
