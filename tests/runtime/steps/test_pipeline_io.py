from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from runtime.device.cpu.cpu_device import CpuDevice
from runtime.errors import HearthError
from runtime.executor.simulated_engine import simulated_config
from runtime.options import EagleDraftingConfig
from runtime.steps.pipeline_io import PipelineIO, build_tensor_map
from runtime.steps.shared_resources import SharedResources
from runtime.tensors.registry import (
    build_registry_for_llm,
    build_registry_for_spec_decode_draft,
)
from runtime.tensors.tensor_map import TensorMap

CONFIG = simulated_config(vocab_size=10, layers=2, max_batch=3, capacity=1024, prefill_chunk=16)
DEVICE = CpuDevice()
CLASSIC = structs.replace(CONFIG, dialect="classic")


def test_buffers_have_their_largest_size() -> None:
    io = PipelineIO.create_for_llm(CONFIG, DEVICE)
    assert io.inputs_embeds.shape == (3, 16, 1)
    assert io.output_logits.shape == (3, 1, 10)
    assert io.select_token_indices.shape == (3, 1)
    assert io.position_ids.shape == (3, 16)
    assert io.next_tokens.shape == (3,)
    assert io.next_tokens.dtype == np.dtype(np.int32)
    assert io.host_context_lengths.shape == (3,)
    assert io.position_ids.dtype == np.int64
    assert io.new_keys == io.new_values == ()


def test_a_classic_engine_gets_buffers_for_new_rows() -> None:
    io = PipelineIO.create_for_llm(CLASSIC, DEVICE)
    assert [one.shape for one in io.new_keys + io.new_values] == [(3, 1, 16, 2)] * 4
    assert io.select_token_indices.dtype == np.int32


def test_every_registered_binding_has_a_buffer_of_its_type(tmp_path: Path) -> None:
    for config in (CONFIG, CLASSIC):
        tensors = TensorMap()
        io = PipelineIO.create_for_llm(config, DEVICE)
        build_tensor_map(tensors, io, SharedResources.create_for_llm(config, tmp_path, DEVICE))
        specs = build_registry_for_llm(config).specs
        assert {spec.name for spec in specs} == set(tensors)
        assert all(tensors.get(spec.name).dtype == spec.dtype for spec in specs)


BASE = structs.replace(
    CONFIG,
    enable_eagle_spec_decode=True,
    output_hidden_dim=3,
    eagle_layers=(0, 1, 2),
    max_verify_tree_size=40,
)
DRAFT = structs.replace(CONFIG, base_hidden_dim=3, max_draft_tree_size=12, output_vocab_size=7)


def test_a_base_engine_holds_its_largest_tree() -> None:
    io = PipelineIO.create_for_llm(BASE, DEVICE)
    # The tree is longer than a prefill chunk.
    assert io.inputs_embeds.shape == (3, 40, 1)
    assert io.output_logits.shape == (3, 40, 10)
    assert io.select_token_indices.shape == (3, 40)
    assert io.trees is not None
    assert io.trees.ids.shape == io.trees.parents.shape == (3, 40)
    assert io.trees.packed_mask.shape == (3, 40, 2)
    assert io.tree_mask is not None
    assert io.tree_mask.shape == (3, 40, 40)
    assert io.hidden_states is not None
    assert io.hidden_states.shape == (3, 40, 3)


def test_trees_of_an_engine_without_a_mask_are_chains() -> None:
    io = PipelineIO.create_for_llm(structs.replace(CONFIG, max_verify_tree_size=5), DEVICE)
    assert io.trees is not None
    assert io.tree_mask is None
    assert io.output_logits.shape == (3, 5, 10)
    assert io.inputs_embeds.shape == (3, 16, 1)


def test_a_draft_engine_has_buffers_for_its_proposal() -> None:
    drafting = EagleDraftingConfig(drafting_top_k=2, drafting_step=3, verify_tree_size=8)
    io = PipelineIO.create_for_spec_decode_draft(DRAFT, DEVICE, drafting, None)
    proposal = io.proposal
    assert proposal is not None
    assert proposal.ids.shape == proposal.parents.shape == proposal.entries.shape == (3, 6)
    assert proposal.table_scores.shape == (3, 1 + 2 + 2 * 4)
    assert io.output_logits.shape == (3, 2, 7)
    assert proposal.hidden_out.shape == (3, 2, 1)
    assert proposal.hidden_in.shape == (3, 6, 1)
    assert io.hidden_states_from_draft is not None
    assert io.hidden_states_from_draft.shape == (3, 16, 1)
    own = io.of_proposal()
    assert own.hidden_states_from_draft is proposal.hidden_in
    assert own.hidden_states_input is io.proposal_hidden_input
    assert own.hidden_states_input is not None
    assert own.hidden_states_input.shape == (3, 6, 3)
    with pytest.raises(HearthError, match="not those of a draft"):
        PipelineIO.create_for_llm(CONFIG, DEVICE).of_proposal()
    assert io.hidden_states_input is not None
    assert io.hidden_states_input.shape == (3, 16, 3)


@pytest.mark.parametrize("chains", [False, True])
def test_bindings_of_base_and_draft_have_buffers(tmp_path: Path, *, chains: bool) -> None:
    drafting = EagleDraftingConfig(drafting_top_k=1, drafting_step=6, verify_tree_size=7)
    base, draft = (structs.replace(config, chains_only=chains) for config in (BASE, DRAFT))
    for config, build, io in (
        (base, build_registry_for_llm, PipelineIO.create_for_llm(base, DEVICE)),
        (
            draft,
            build_registry_for_spec_decode_draft,
            PipelineIO.create_for_spec_decode_draft(draft, DEVICE, drafting, None),
        ),
    ):
        assert (io.tree_mask is None) == chains
        tensors = TensorMap()
        build_tensor_map(tensors, io, SharedResources.create_for_llm(config, tmp_path, DEVICE))
        specs = build(config).specs
        assert {spec.name for spec in specs} == set(tensors)
        assert all(tensors.get(spec.name).dtype == spec.dtype for spec in specs)


def test_a_native_cache_is_its_own_output(tmp_path: Path) -> None:
    tensors = TensorMap()
    resources = SharedResources.create_for_llm(CONFIG, tmp_path, DEVICE)
    build_tensor_map(tensors, PipelineIO.create_for_llm(CONFIG, DEVICE), resources)
    for layer in range(2):
        assert tensors.get(f"present_k_cache_{layer}") is tensors.get(f"k_cache_{layer}")
        assert tensors.get(f"v_cache_{layer}") is resources.cache_managers[0].kv.values[layer]
    assert tensors.get("kvcache_start_index") is resources.cache_managers[0].lengths


def test_a_classic_cache_and_its_new_rows_are_apart(tmp_path: Path) -> None:
    tensors = TensorMap()
    io = PipelineIO.create_for_llm(CLASSIC, DEVICE)
    build_tensor_map(tensors, io, SharedResources.create_for_llm(CLASSIC, tmp_path, DEVICE))
    assert tensors.get("present_v_cache_1") is io.new_values[1]
    assert tensors.get("v_cache_1") is not io.new_values[1]


def test_building_the_map_again_changes_nothing(tmp_path: Path) -> None:
    tensors = TensorMap()
    io, resources = (
        PipelineIO.create_for_llm(CONFIG, DEVICE),
        SharedResources.create_for_llm(CONFIG, tmp_path, DEVICE),
    )
    build_tensor_map(tensors, io, resources)
    epoch = tensors.epoch
    build_tensor_map(tensors, io, resources)
    assert tensors.epoch == epoch
