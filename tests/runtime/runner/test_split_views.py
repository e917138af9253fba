"""What the seed promises of split K/V views, kept by allocations of their own."""

from itertools import chain, combinations, permutations
from pathlib import Path

import pytest
from msgspec import structs

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.options import EagleDraftingConfig
from hearth.runtime.runner.pipeline_io import DraftIO, PipelineIO, StepIO, build_tensor_map
from hearth.runtime.runner.shared_resources import SharedResources
from hearth.runtime.tensors.tensor import Tensor, TensorMap

LAYERS = 3
CONFIG = simulated_config(vocab_size=10, layers=LAYERS, max_batch=2, capacity=512)
BASE = structs.replace(
    CONFIG,
    enable_eagle_spec_decode=True,
    output_hidden_dim=3,
    eagle_layers=(0, 1, 2),
    max_verify_tree_size=12,
)
DRAFT = structs.replace(
    CONFIG,
    num_decoder_layers=1,
    num_attention_layers=1,
    base_hidden_dim=3,
    max_draft_tree_size=12,
)
DEVICE = CpuDevice()


@pytest.fixture
def resources() -> SharedResources:
    """Those of a base and its draft."""
    made = SharedResources.create_for_llm(BASE, Path(), DEVICE)
    made.add_draft(DRAFT, Path(), DEVICE)
    return made


def _steps(resources: SharedResources) -> list[tuple[StepIO, int]]:
    """The steps of base and draft, and which caches each of them binds."""
    base = PipelineIO.create_for_llm(BASE, resources, DEVICE)
    drafting = EagleDraftingConfig(drafting_top_k=2, drafting_step=3, verify_tree_size=6)
    draft = DraftIO.create_for_spec_decode_draft(DRAFT, drafting, resources, DEVICE)
    return [(base.step, 0), (draft.entries, 1), (draft.growing, 1)]


def test_the_base_comes_first_and_then_one_draft() -> None:
    made = SharedResources.create_for_llm(BASE, Path(), DEVICE)
    assert [len(one.kv.keys) for one in made.cache_managers] == [LAYERS]
    made.add_draft(DRAFT, Path(), DEVICE)
    assert [len(one.kv.keys) for one in made.cache_managers] == [LAYERS, 1]
    with pytest.raises(HearthError, match="already") as caught:
        made.add_draft(DRAFT, Path(), DEVICE)
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
