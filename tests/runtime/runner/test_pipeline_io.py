from itertools import chain, combinations, permutations
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager
from hearth.runtime.options import EagleDraftingConfig
from hearth.runtime.runner.pipeline_io import (
    DraftIO,
    PipelineIO,
    StepIO,
    build_tensor_map,
    draft_zero_bytes,
)
from hearth.runtime.runner.shared_resources import SharedResources, allocate_zero_buffer
from hearth.runtime.tensors.profiles import InferenceDims
from hearth.runtime.tensors.registry import (
    TensorRegistry,
    build_registry_for_llm,
    build_registry_for_spec_decode_draft,
)
from hearth.runtime.tensors.tensor import Tensor, TensorMap

CONFIG = simulated_config(vocab_size=10, layers=2, max_batch=3, capacity=1024, prefill_chunk=16)
DEVICE = CpuDevice()
CLASSIC = structs.replace(CONFIG, dialect="classic")
BASE = structs.replace(
    CONFIG,
    enable_eagle_spec_decode=True,
    output_hidden_dim=3,
    eagle_layers=(0, 1, 2),
    max_verify_tree_size=40,
)
DRAFT = structs.replace(CONFIG, base_hidden_dim=3, max_draft_tree_size=12, output_vocab_size=7)


def _resources(
    config: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig | None = None
) -> SharedResources:
    resources = SharedResources.create_for_llm(config, Path(), DEVICE)
    if draft is not None:
        resources.cache_managers.append(HybridCacheManager(draft, DEVICE))
        resources.rope_tables.append(())
    return resources


def _create(config: LLMEngineRunnerConfig) -> PipelineIO:
    return PipelineIO.create_for_llm(config, _resources(config), DEVICE)


def _mapped(step: StepIO, resources: SharedResources, cache_index: int = 0) -> TensorMap:
    tensors = TensorMap()
    build_tensor_map(tensors, step, resources, cache_index)
    return tensors


def _check_map(tensors: TensorMap, registry: TensorRegistry) -> None:
    own = {spec.name for spec in registry.own_specs}
    assert {spec.name for spec in registry.specs} | own == set(tensors)
    assert all(tensors.get(spec.name).dtype == spec.dtype for spec in registry.specs)


def test_buffers_have_their_largest_size() -> None:
    step, _, trees = _create(CONFIG)
    inputs = step.inputs
    assert inputs.inputs_embeds.shape == (3, 16, 1)
    assert step.logits.shape == (3, 1, 10)
    assert inputs.last_token_ids.shape == (3, 1)
    assert inputs.attention_pos_id.shape == (3, 16)
    assert inputs.next_tokens.shape == (3,)
    assert inputs.next_tokens.dtype == np.dtype(np.int32)
    assert inputs.attention_pos_id.dtype == np.int64
    assert step.new_keys == step.new_values == step.hidden == ()
    assert trees.ids.shape == (3, 1)


def test_a_buffer_has_one_name() -> None:
    step = _create(BASE).step
    fields = step.inputs._asdict() | {"logits": step.logits, "hidden_states": step.hidden[0]}
    names = {field: tensor.name for field, tensor in fields.items() if tensor is not None}
    # The caches own it and count in it; the binding's name says what the engine does with it.
    assert names.pop("lengths") == "kvcache_start_index"
    assert all(field == name for field, name in names.items())


def test_a_classic_engine_gets_buffers_for_new_rows() -> None:
    step = _create(CLASSIC).step
    assert [one.shape for one in step.new_keys + step.new_values] == [(3, 1, 16, 2)] * 4
    assert step.inputs.last_token_ids.dtype == np.int32


@pytest.mark.parametrize("config", [CONFIG, CLASSIC])
def test_every_registered_binding_has_a_buffer_of_its_type(config: LLMEngineRunnerConfig) -> None:
    tensors = _mapped(_create(config).step, _resources(config))
    _check_map(tensors, build_registry_for_llm(config))


def test_a_base_engine_holds_its_largest_tree() -> None:
    io = step, prompt, trees = _create(BASE)
    # The tree is longer than a prefill chunk.
    assert step.inputs.inputs_embeds.shape == (3, 40, 1)
    assert step.logits.shape == (3, 40, 10)
    assert step.inputs.last_token_ids.shape == (3, 40)
    assert trees.ids.shape == trees.parents.shape == (3, 40)
    assert step.inputs.tree_mask is not None
    assert step.inputs.tree_mask.shape == (3, 40, 40)
    # Behind the nodes of all rows is one place a row for what waits.
    assert [one.shape for one in step.hidden] == [(3, 41, 3)]
    assert io.waiting == 3 * 40
    assert [one.shape for one in prompt.hidden] == [(3, 16, 3)]


def test_trees_of_an_engine_without_a_mask_are_chains() -> None:
    step, _, trees = _create(structs.replace(CONFIG, max_verify_tree_size=5))
    assert trees.ids.shape == (3, 5)
    assert step.inputs.tree_mask is None
    assert step.logits.shape == (3, 5, 10)
    assert step.inputs.inputs_embeds.shape == (3, 16, 1)


def test_a_draft_engine_has_buffers_for_its_proposal() -> None:
    drafting = EagleDraftingConfig(drafting_top_k=2, drafting_step=3, verify_tree_size=8)
    resources = _resources(BASE, DRAFT)
    io = DraftIO.create_for_spec_decode_draft(DRAFT, drafting, resources, DEVICE)
    proposal = io.proposal
    assert proposal.ids.shape == proposal.parents.shape == proposal.entries.shape == (3, 6)
    assert proposal.table_scores.shape == (3, 1 + 2 + 2 * 4)
    assert proposal.logits is io.entries.logits is io.growing.logits
    assert proposal.logits.shape == (3, 2, 7)
    assert [one.shape for one in io.entries.hidden] == [(3, 2, 1), (3, 16, 3), (3, 16, 1)]
    assert [one.shape for one in io.growing.hidden] == [(3, 2, 1), (3, 6, 3), (3, 6, 1)]
    assert io.entries.hidden[1] is io.hidden_states_input
    assert io.growing.hidden[0] is io.entries.hidden[0] is proposal.hidden_states
    assert io.growing.hidden[2] is proposal.hidden_states_from_draft
    assert io.entries.inputs.lengths is resources.cache_managers[1].lengths


def test_whoever_binds_nothing_binds_one_buffer_that_nobody_can_write() -> None:
    drafting = EagleDraftingConfig(drafting_top_k=2, drafting_step=3, verify_tree_size=8)
    base = structs.replace(BASE, image_token_id=5, num_deepstack_features=2)
    resources = SharedResources.create_for_llm(
        base, Path(), DEVICE, zeros=draft_zero_bytes(DRAFT, drafting, 3)
    )
    resources.cache_managers.append(HybridCacheManager(DRAFT, DEVICE))
    resources.rope_tables.append(())
    buffer = resources.zero_buffer
    assert buffer is not None
    assert buffer.nbytes == max(3 * 40 * 4, 3 * 16 * 4, 3 * 6 * 3 * 4)
    step, prompt, _ = PipelineIO.create_for_llm(base, resources, DEVICE)
    draft = DraftIO.create_for_spec_decode_draft(DRAFT, drafting, resources, DEVICE)
    assert resources.zero_buffer is buffer
    nothing = [*step.deepstack, draft.entries.hidden[2], draft.growing.hidden[1]]
    assert [one.shape for one in nothing] == [(3, 40, 1), (3, 40, 1), (3, 16, 1), (3, 6, 3)]
    assert {one.address for one in nothing} == {buffer.address}
    others = [*prompt.deepstack, draft.entries.hidden[1], draft.growing.hidden[2]]
    assert buffer.address not in {one.address for one in others}
    for one in nothing:
        with pytest.raises(ValueError, match="read-only"):
            one.view((1, 1, 1))[...] = np.nan
    allocate_zero_buffer(resources, buffer.nbytes, DEVICE)
    assert resources.zero_buffer is buffer
    with pytest.raises(HearthError, match="zeros has no"):
        resources.zeros("more", (buffer.nbytes + 1,), np.dtype(np.uint8))


def test_an_engine_of_kernels_takes_its_mask_in_bits() -> None:
    base = structs.replace(BASE, backend="kernels", device="cuda")
    step = PipelineIO.create_for_llm(base, _resources(BASE), DEVICE).step
    assert step.inputs.tree_mask is None
    assert step.inputs.packed_mask is not None
    assert step.inputs.packed_mask.shape == (3, 40, 2)
    spec = build_registry_for_llm(base).get("packed_mask")
    assert spec is not None
    assert spec.resolve(InferenceDims.spec_verify(2, 33, 64)) == (2, 33, 2)


@pytest.mark.parametrize("backend", ["simulated", "kernels"])
@pytest.mark.parametrize("chains", [False, True])
def test_bindings_of_base_and_draft_have_buffers(backend: str, *, chains: bool) -> None:
    drafting = EagleDraftingConfig(drafting_top_k=1, drafting_step=6, verify_tree_size=7)
    base, draft = (
        structs.replace(config, chains_only=chains, backend=backend) for config in (BASE, DRAFT)
    )
    resources = _resources(BASE, DRAFT)
    step = PipelineIO.create_for_llm(base, resources, DEVICE).step
    own = DraftIO.create_for_spec_decode_draft(draft, drafting, resources, DEVICE)
    _check_map(_mapped(step, resources), build_registry_for_llm(base))
    for one in (own.entries, own.growing):
        assert (one.inputs.tree_mask is None) == (chains or backend == "kernels")
        assert (one.inputs.packed_mask is None) == (chains or backend != "kernels")
        _check_map(_mapped(one, resources, 1), build_registry_for_spec_decode_draft(draft))


def test_a_native_cache_is_its_own_output() -> None:
    resources = _resources(CONFIG)
    tensors = _mapped(PipelineIO.create_for_llm(CONFIG, resources, DEVICE).step, resources)
    for layer in range(2):
        assert tensors.get(f"present_k_cache_{layer}") is tensors.get(f"k_cache_{layer}")
        assert tensors.get(f"v_cache_{layer}") is resources.cache_managers[0].kv.values[layer]
    assert tensors.get("kvcache_start_index") is resources.cache_managers[0].lengths


def test_a_classic_cache_and_its_new_rows_are_apart() -> None:
    step = _create(CLASSIC).step
    tensors = _mapped(step, _resources(CLASSIC))
    assert tensors.get("present_v_cache_1") is step.new_values[1]
    assert tensors.get("v_cache_1") is not step.new_values[1]


@pytest.mark.parametrize("config", [CONFIG, CLASSIC])
def test_a_prompt_binds_caches_from_its_first_row_and_a_start_of_its_own(
    config: LLMEngineRunnerConfig,
) -> None:
    resources = _resources(config)
    step, prompt, _ = PipelineIO.create_for_llm(config, resources, DEVICE)
    caches = resources.cache_managers[0]
    tensors = TensorMap()
    build_tensor_map(tensors, prompt, resources, first=2)
    row = caches.kv.bucket * config.num_kv_heads * config.head_dim * 4
    for layer in range(2):
        keys = tensors.get(f"k_cache_{layer}")
        assert keys.address == caches.kv.keys[layer].address + 2 * row
        assert keys.nbytes == row
        assert (tensors.get(f"present_k_cache_{layer}") is keys) == (config is CONFIG)
    start = tensors.get("kvcache_start_index")
    assert start is prompt.inputs.lengths
    assert start is not step.inputs.lengths
    assert tensors.get("inputs_embeds") is step.inputs.inputs_embeds


def test_building_the_map_again_changes_nothing() -> None:
    resources = _resources(CONFIG)
    step = PipelineIO.create_for_llm(CONFIG, resources, DEVICE).step
    tensors = _mapped(step, resources)
    epoch = tensors.epoch
    build_tensor_map(tensors, step, resources)
    assert tensors.epoch == epoch


LAYERS = 3
SPLIT_CONFIG = simulated_config(vocab_size=10, layers=LAYERS, max_batch=2, capacity=512)
SPLIT_BASE = structs.replace(
    SPLIT_CONFIG,
    enable_eagle_spec_decode=True,
    output_hidden_dim=3,
    eagle_layers=(0, 1, 2),
    max_verify_tree_size=12,
)
SPLIT_DRAFT = structs.replace(
    SPLIT_CONFIG,
    num_decoder_layers=1,
    num_attention_layers=1,
    base_hidden_dim=3,
    max_draft_tree_size=12,
)


@pytest.fixture
def resources() -> SharedResources:
    """Those of a base and its draft."""
    made = SharedResources.create_for_llm(SPLIT_BASE, Path(), DEVICE)
    made.add_draft(SPLIT_DRAFT, Path(), DEVICE)
    return made


def _steps(resources: SharedResources) -> list[tuple[StepIO, int]]:
    """The steps of base and draft, and which caches each of them binds."""
    base = PipelineIO.create_for_llm(SPLIT_BASE, resources, DEVICE)
    drafting = EagleDraftingConfig(drafting_top_k=2, drafting_step=3, verify_tree_size=6)
    draft = DraftIO.create_for_spec_decode_draft(SPLIT_DRAFT, drafting, resources, DEVICE)
    return [(base.step, 0), (draft.entries, 1), (draft.growing, 1)]


def test_the_base_comes_first_and_then_one_draft() -> None:
    made = SharedResources.create_for_llm(SPLIT_BASE, Path(), DEVICE)
    assert [len(one.kv.keys) for one in made.cache_managers] == [LAYERS]
    made.add_draft(SPLIT_DRAFT, Path(), DEVICE)
    assert [len(one.kv.keys) for one in made.cache_managers] == [LAYERS, 1]
    with pytest.raises(HearthError, match="already") as caught:
        made.add_draft(SPLIT_DRAFT, Path(), DEVICE)
    assert caught.value.code == "internal"
    assert (len(made.cache_managers), len(made.rope_tables)) == (2, 2)


def test_no_two_caches_share_memory(resources: SharedResources) -> None:
    def caches() -> list[Tensor]:
        both = (one.kv for one in resources.cache_managers)
        return [tensor for kv in both for tensor in (*kv.keys, *kv.values)]

    assert len(caches()) == 2 * (LAYERS + 1)
    for one, other in combinations(caches(), 2):
        first, second = sorted((one, other), key=lambda tensor: tensor.address)
        assert first.address + first.nbytes <= second.address


def test_maps_that_are_built_again_keep_their_addresses(
    resources: SharedResources,
) -> None:
    steps = _steps(resources)
    maps = [TensorMap() for _ in steps]
    for tensors, (step, index) in zip(maps, steps, strict=True):
        build_tensor_map(tensors, step, resources, index)
    before = [_addresses(tensors) for tensors in maps]
    epochs = [tensors.epoch for tensors in maps]
    for place in chain.from_iterable(permutations(range(3))):
        step, index = steps[place]
        build_tensor_map(maps[place], step, resources, index)
    assert [_addresses(tensors) for tensors in maps] == before
    assert [tensors.epoch for tensors in maps] == epochs
    for tensors, layers in zip(maps, (LAYERS, 1, 1), strict=True):
        bound = {name for name in tensors if name.startswith(("k_cache_", "v_cache_"))}
        assert bound == {f"{kind}_cache_{layer}" for kind in "kv" for layer in range(layers)}


def _addresses(tensors: TensorMap) -> dict[str, int]:
    return {name: tensors.get(name).address for name in tensors}
