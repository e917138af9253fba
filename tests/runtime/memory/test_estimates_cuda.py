import pytest
from msgspec import structs

from hearth.runtime.config import FileRecord, LLMEngineRunnerConfig
from hearth.runtime.engine_folder import PLAN_FILE
from hearth.runtime.memory.estimates import (
    LOADING,
    cuda_scratch_bytes,
    estimate_draft,
    estimate_engine,
    estimate_host,
)
from hearth.runtime.memory.sizes import projection_elements
from hearth.runtime.memory.step_scratch import predicted_scratch
from hearth.runtime.options import EagleDraftingConfig
from tests.runtime.engine_configs import PLAN, draft_config, small_config


def of(rows: int, capacity: int, config: LLMEngineRunnerConfig) -> LLMEngineRunnerConfig:
    return structs.replace(config, max_supported_batch_size=rows, max_kv_cache_capacity=capacity)


def scratch_of(rows: int, capacity: int, config: LLMEngineRunnerConfig) -> int:
    return estimate_engine(of(rows, capacity, config))["engine_scratch"]


def weight_bytes(config: LLMEngineRunnerConfig) -> int:
    return estimate_engine(config)["weights"]


@pytest.fixture
def config() -> LLMEngineRunnerConfig:
    return structs.replace(small_config(), device="cuda", dtype="float16", kv_cache_dtype="float16")


def test_weights_stay_in_their_type(config: LLMEngineRunnerConfig) -> None:
    wide = structs.replace(config, dtype="float32")
    assert weight_bytes(wide) == 2 * weight_bytes(config)
    gains = 2 * (2 * 16 + 2 * 8) + 16
    assert weight_bytes(config) == 2 * (projection_elements(config) + gains)


def test_a_plan_is_as_large_as_its_file(config: LLMEngineRunnerConfig) -> None:
    files = {PLAN_FILE: FileRecord(4321, "")}
    assert weight_bytes(structs.replace(config, files=files)) == 4321


def test_a_plan_says_what_its_steps_take(config: LLMEngineRunnerConfig) -> None:
    unopened = structs.replace(config, plan=PLAN)
    opened = structs.replace(config, plan=structs.replace(PLAN, scratch_bytes=640))
    guess, known = (scratch_of(2, 32, one) for one in (unopened, opened))
    assert guess == cuda_scratch_bytes(of(2, 32, config), 16)
    assert known == 640


def test_scratch_memory_grows_with_rows_and_slots(config: LLMEngineRunnerConfig) -> None:
    small, rows, slots = (scratch_of(*one, config) for one in ((1, 32), (2, 32), (1, 64)))
    assert rows > small < slots


def test_kernels_lay_their_scratch_memory_out(config: LLMEngineRunnerConfig) -> None:
    kernels = structs.replace(config, backend="kernels")
    assert scratch_of(2, 32, kernels) == predicted_scratch(kernels, 2, 16, 32)
    # They bind their weights.
    assert weight_bytes(kernels) == 0


def test_another_engine_has_another_library(config: LLMEngineRunnerConfig) -> None:
    kinds = ("onnxruntime", "tensorrt")
    libraries = {
        estimate_engine(structs.replace(config, backend=kind))["library"] for kind in kinds
    }
    assert len(libraries) == 2


def test_a_simulated_engine_has_no_weights(config: LLMEngineRunnerConfig) -> None:
    simulated = structs.replace(config, backend="simulated")
    parts = estimate_engine(simulated)
    assert parts["weights"] == parts["library"] == parts["engine_scratch"] == 0


def test_the_host_holds_the_weights_while_they_load(config: LLMEngineRunnerConfig) -> None:
    parts = estimate_host(config, 1234)
    assert parts[LOADING] == 1234
    assert parts["process"] > parts["pinned"] > 0


def test_scores_grow_with_slots_and_trees_add_their_mask(config: LLMEngineRunnerConfig) -> None:
    trees = structs.replace(
        config, enable_eagle_spec_decode=True, output_hidden_dim=48, max_verify_tree_size=16
    )
    small, large = ([scratch_of(2, slots, one) for slots in (32, 64)] for one in (config, trees))
    assert small[1] - small[0] == 2 * 16 * (2 * 2) * 32 * 2
    # Two copies of the scores, and the mask, of two heads over one and two rows of 16 tokens.
    assert large[1] - large[0] == 2 * 16 * (2 * 2 + 2) * 32 * 2


def test_a_draft_of_a_gpu_keeps_its_type(config: LLMEngineRunnerConfig) -> None:
    draft = draft_config(config)
    drafting = EagleDraftingConfig(drafting_top_k=2, drafting_step=3)
    parts = estimate_draft(draft, drafting)
    assert parts["draft_library"] > 0
    assert parts["draft_weights"] == weight_bytes(draft)
    assert parts["draft_scratch"] == cuda_scratch_bytes(draft, 16)
