from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from runtime.caches.hybrid_cache_manager import HybridCacheManager
from runtime.config import LORA_TARGETS, LLMEngineRunnerConfig
from runtime.device.cpu.cpu_device import CpuDevice
from runtime.memory.sizes import (
    adapter_bytes,
    draft_buffer_bytes,
    draft_zero_bytes,
    kv_cache_bytes,
    prompt_graph_bytes,
    rope_bytes,
    step_buffer_bytes,
    zero_bytes,
)
from runtime.options import EagleDraftingConfig
from runtime.steps.pipeline_io import DraftIO, PipelineIO
from runtime.steps.shared_resources import SharedResources
from runtime.tensors.lora import lora_targets
from runtime.tensors.tensor import Tensor
from tests.runtime.engine_configs import draft_config, small_config


def test_caches_and_tables_grow_with_their_slots() -> None:
    config = small_config()
    assert kv_cache_bytes(config, 1, 1) == 2 * 2 * 1 * 8 * 4
    assert kv_cache_bytes(config, 3, 16) == 48 * kv_cache_bytes(config, 1, 1)
    assert rope_bytes(config, 4, 64) == 2 * 64 * 4 * 4
    of_rows = structs.replace(config, use_context_dependent_rope=True)
    assert rope_bytes(of_rows, 4, 64) == 5 * rope_bytes(config, 4, 64)


def test_captured_prompts_have_the_kernels_of_adapters() -> None:
    plain = structs.replace(small_config(), backend="kernels", device="cuda")
    taking = structs.replace(plain, max_supported_lora_rank=8)
    taking = structs.replace(taking, lora_targets=lora_targets(taking))
    # Twelve beside the fourteen of a layer; eight stand outside of the layers.
    kernels = [prompt_graph_bytes(one) for one in (plain, taking)]
    assert kernels[1] * (2 * 14 + 8) == kernels[0] * (2 * 26 + 8)


NATIVE = small_config()
EMBEDDING = Tensor.zeros("embedding", (100, 16), np.dtype(np.float32))
TREES = structs.replace(
    NATIVE, enable_eagle_spec_decode=True, output_hidden_dim=48, max_verify_tree_size=40
)
HALF: dict[str, Any] = {"dtype": "float16", "kv_cache_dtype": "float16"}
CONFIGS = [
    NATIVE,
    structs.replace(NATIVE, dialect="classic"),
    structs.replace(NATIVE, max_verify_tree_size=5),
    TREES,
    structs.replace(TREES, image_token_id=5, num_deepstack_features=2),
    structs.replace(TREES, dialect="classic", **HALF),
]


def shared(config: LLMEngineRunnerConfig) -> SharedResources:
    """Caches and tables, which no step buffer is part of, for a base or for a draft."""
    caches = HybridCacheManager(config, CpuDevice())
    resources = SharedResources([caches, caches], EMBEDDING)
    resources.rope_tables = [(), ()]
    return resources


def tensors(part: Any) -> Iterator[Tensor]:
    """All buffers of a part and of its parts."""
    for one in part:
        if isinstance(one, Tensor):
            yield one
        elif one is not None:
            yield from tensors(one)


def allocated(io: PipelineIO | DraftIO, resources: SharedResources) -> int:
    """Bytes of all buffers, each counted once, but for what lies in the buffer of zeros."""
    others = {id(EMBEDDING), id(resources.cache_managers[0].lengths)}
    zeros = resources.zero_buffer
    found = {
        id(one): one
        for one in tensors(io)
        if id(one) not in others and (zeros is None or one.owner is not zeros)
    }
    return sum(one.array.nbytes for one in found.values())


def test_adapters_of_a_gpu_have_the_greatest_rank_and_slots() -> None:
    config = structs.replace(NATIVE, max_supported_lora_rank=8, lora_targets=LORA_TARGETS)
    assert adapter_bytes(config, [100, 20]) == 120
    fixed = structs.replace(config, device="cuda", dtype="float16")
    # In two layers: q, k, v, o, gate, up and down of 16, 8 and 32 elements.
    ends = 32 + 24 + 24 + 32 + 48 + 48 + 48
    assert adapter_bytes(fixed, []) == 2 * ends * 8 * 2
    assert adapter_bytes(fixed, [100, 20]) == 3 * adapter_bytes(fixed, [])
    kernels = structs.replace(
        fixed, backend="kernels", lora_targets=("qkv", "o", "gate_up", "down")
    )
    # Slots of rank 16, with nothing beside the diagonal of a B.
    assert adapter_bytes(kernels, []) == 2 * ends * 16 * 2


@pytest.mark.parametrize("config", CONFIGS)
def test_step_buffers_are_as_large_as_those_that_are_allocated(
    config: LLMEngineRunnerConfig,
) -> None:
    resources = shared(config)
    io = PipelineIO.create_for_llm(config, resources, CpuDevice())
    rows = config.max_supported_batch_size
    assert step_buffer_bytes(config, rows) == allocated(io, resources)
    zeros = resources.zero_buffer
    assert zero_bytes(config, rows) == (0 if zeros is None else zeros.nbytes)


@pytest.mark.parametrize("base", [NATIVE, *CONFIGS[-2:]])
@pytest.mark.parametrize("shape", [(1, 4, 5), (8, 1, 9), (10, 6, 60)])
def test_draft_buffers_are_as_large_as_those_that_are_allocated(
    base: LLMEngineRunnerConfig, shape: tuple[int, int, int]
) -> None:
    top_k, step, nodes = shape
    drafting = EagleDraftingConfig(drafting_top_k=top_k, drafting_step=step, verify_tree_size=nodes)
    config = structs.replace(draft_config(base), enable_eagle_spec_decode=False)
    whole = structs.replace(config, output_vocab_size=config.vocab_size)
    for one, ids in (
        (config, Tensor.zeros("full_ids", (40,), np.dtype(np.int32))),
        (whole, None),
    ):
        resources = shared(one)
        resources.full_ids = ids
        io = DraftIO.create_for_spec_decode_draft(one, drafting, resources, CpuDevice())
        rows, zeros = one.max_supported_batch_size, resources.zero_buffer
        assert draft_buffer_bytes(one, drafting, rows) == allocated(io, resources)
        assert zeros is not None
        assert draft_zero_bytes(one, drafting, rows) == zeros.nbytes


def test_kernels_bind_no_zeros_for_hidden_states_that_they_leave_out() -> None:
    drafting = EagleDraftingConfig(drafting_top_k=8, drafting_step=6, verify_tree_size=40)
    config = structs.replace(draft_config(TREES), enable_eagle_spec_decode=False)
    for backend in ("onnxruntime", "kernels"):
        one = structs.replace(config, backend=backend)
        resources = shared(one)
        io = DraftIO.create_for_spec_decode_draft(one, drafting, resources, CpuDevice())
        bound = [io.entries.hidden[2], io.growing.hidden[1]]
        assert bound[1].nbytes == 0 or backend == "onnxruntime"
        most = max(tensor.nbytes for tensor in bound)
        assert draft_zero_bytes(one, drafting, one.max_supported_batch_size) == most
