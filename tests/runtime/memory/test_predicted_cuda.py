import pytest
from msgspec import structs

from runtime.config import WEIGHTS_FILE, FileRecord, LLMEngineRunnerConfig
from runtime.device.cuda.wide_draws import WORK_BYTES
from runtime.engine_folder import PLAN_FILE
from runtime.memory.predicted import (
    cuda_scratch_bytes,
    cuda_weight_bytes,
    predict_cuda_host_memory,
    predict_draft_memory,
    predict_memory,
)
from runtime.memory.sizes import embedding_bytes, projection_elements, weights_head_bytes
from runtime.memory.step_scratch import predicted_scratch
from runtime.options import EagleDraftingConfig
from tests.runtime.engine_configs import PLAN, draft_config, small_config


@pytest.fixture
def config() -> LLMEngineRunnerConfig:
    return structs.replace(small_config(), device="cuda", dtype="float16", kv_cache_dtype="float16")


def test_an_engine_of_a_gpu_is_predicted_for_the_gpu(config: LLMEngineRunnerConfig) -> None:
    parts = predict_memory(config, max_batch=2, capacity=32)
    assert set(parts) >= {"context", "library", "weights", "kv_cache", "sampler"}
    assert "process" not in parts


def test_weights_stay_in_their_type(config: LLMEngineRunnerConfig) -> None:
    wide = structs.replace(config, dtype="float32")
    assert cuda_weight_bytes(wide) == 2 * cuda_weight_bytes(config)
    gains = 2 * (2 * 16 + 2 * 8) + 16
    assert cuda_weight_bytes(config) == 2 * (projection_elements(config) + gains)


def test_a_plan_is_as_large_as_its_file(config: LLMEngineRunnerConfig) -> None:
    files = {PLAN_FILE: FileRecord(4321, "")}
    assert cuda_weight_bytes(structs.replace(config, files=files)) == 4321


def test_an_engine_of_kernels_holds_its_file_once(config: LLMEngineRunnerConfig) -> None:
    stored = 2 * (projection_elements(config) + 80)
    kernels = structs.replace(
        config,
        backend="kernels",
        external_weight_files=(WEIGHTS_FILE,),
        files={WEIGHTS_FILE: FileRecord(weights_head_bytes(2) + stored, "")},
    )
    # A tied head is the embedding table itself.
    assert cuda_weight_bytes(kernels) + embedding_bytes(kernels) == weights_head_bytes(2) + stored
    scratch = predict_memory(kernels, max_batch=2, capacity=32)["engine_scratch"]
    assert scratch == predicted_scratch(kernels, 2, 16, 32)


def test_a_plan_says_what_its_steps_take(config: LLMEngineRunnerConfig) -> None:
    unopened = structs.replace(config, plan=PLAN)
    opened = structs.replace(config, plan=structs.replace(PLAN, scratch_bytes=640))
    guess, known = (
        predict_memory(one, max_batch=2, capacity=32)["engine_scratch"]
        for one in (unopened, opened)
    )
    assert guess == cuda_scratch_bytes(config, 2, 16, 32)
    assert known == 640


def test_parts_grow_with_rows_and_slots(config: LLMEngineRunnerConfig) -> None:
    small = predict_memory(config, max_batch=1, capacity=32)
    rows = predict_memory(config, max_batch=2, capacity=32)
    slots = predict_memory(config, max_batch=1, capacity=64)
    assert rows["sampler"] - small["sampler"] == 800
    assert WORK_BYTES <= small["sampler"] - 800 < 1.2 * WORK_BYTES
    assert rows["kv_cache"] == slots["kv_cache"] == 2 * small["kv_cache"]
    assert rows["engine_scratch"] > small["engine_scratch"] < slots["engine_scratch"]
    for name in ("context", "library", "weights", "embedding"):
        assert rows[name] == slots[name] == small[name]


def test_another_engine_has_another_library(config: LLMEngineRunnerConfig) -> None:
    kinds = ("onnxruntime", "tensorrt")
    libraries = {
        predict_memory(structs.replace(config, backend=kind), max_batch=1, capacity=8)["library"]
        for kind in kinds
    }
    assert len(libraries) == 2


def test_a_simulated_engine_has_no_weights(config: LLMEngineRunnerConfig) -> None:
    simulated = structs.replace(config, backend="simulated")
    parts = predict_memory(simulated, max_batch=1, capacity=8)
    assert parts["weights"] == parts["library"] == parts["engine_scratch"] == 0
    assert predict_cuda_host_memory(simulated)["weights_while_loading"] == 0


def test_the_host_holds_the_weights_while_they_load(config: LLMEngineRunnerConfig) -> None:
    parts = predict_cuda_host_memory(config)
    assert parts["weights_while_loading"] == cuda_weight_bytes(config)
    assert parts["process"] > parts["pinned"] > 0


def test_scores_grow_with_slots_and_trees_add_their_mask(config: LLMEngineRunnerConfig) -> None:
    trees = structs.replace(
        config, enable_eagle_spec_decode=True, output_hidden_dim=48, max_verify_tree_size=16
    )
    small, large = (
        [predict_memory(one, max_batch=2, capacity=c)["engine_scratch"] for c in (32, 64)]
        for one in (config, trees)
    )
    # Two copies of the scores, and the mask, of two heads over one and two rows of 16 tokens.
    assert small[1] - small[0] == 2 * 16 * (2 * 2) * 32 * 2
    assert large[1] - large[0] == 2 * 16 * (2 * 2 + 2) * 32 * 2


def test_a_draft_of_a_gpu_keeps_its_type(config: LLMEngineRunnerConfig) -> None:
    draft = draft_config(config)
    drafting = EagleDraftingConfig(drafting_top_k=2, drafting_step=3)
    parts = predict_draft_memory(draft, drafting, max_batch=2, capacity=32)
    assert parts["draft_library"] > 0
    assert parts["draft_weights"] == cuda_weight_bytes(draft)
    assert parts["draft_kv_cache"] == 2 * 32 * 2 * 8 * 2
    assert parts["draft_scratch"] == cuda_scratch_bytes(draft, 2, 16, 32)
