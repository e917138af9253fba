from copy import copy
from typing import Any, NamedTuple

import numpy as np

from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device, ProposalBuffers, StepBuffers, TreeBuffers
from runtime.errors import HearthError
from runtime.options import EagleDraftingConfig
from runtime.steps.shared_resources import SharedResources
from runtime.tensors.dtypes import numpy_dtype
from runtime.tensors.registry import index_dtype
from runtime.tensors.tensor import Tensor
from runtime.tensors.tensor_map import TensorMap

_ID = np.dtype(np.int32)
_SCORE = np.dtype(np.float32)


class StepSizes(NamedTuple):
    """The largest step: rows, tokens a row, and tokens of a row that get logits."""

    batch: int
    tokens: int
    selected: int


class PipelineIO:
    """All buffers of an engine's steps, allocated once at their largest size; addresses stay.

    A step uses the first elements of each buffer as a dense array of its own shape. S is the
    longest step: a prefill chunk or a token tree; N the largest tree, 1 without speculation.
    """

    inputs_embeds: Tensor
    """[max batch, S, H], the engine's type."""
    output_logits: Tensor
    """[max batch, N, V], float32."""
    next_tokens: Tensor
    """[max batch] int32: the newest token of each row, from the sampler to the next step."""
    select_token_indices: Tensor
    """[max batch, N]: which tokens of each row get logits; bound as `last_token_ids`."""
    position_ids: Tensor
    """[max batch, S]; bound as `attention_pos_id`."""
    host_context_lengths: Tensor
    """[max batch]: tokens of each row in the step, without padding; on the host, not bound."""
    new_keys: tuple[Tensor, ...] = ()
    """Classic dialect: [max batch, kv_heads, S, head_dim] per attention layer."""
    new_values: tuple[Tensor, ...] = ()
    """As `new_keys`."""
    tree_mask: Tensor | None = None
    """[max batch, S, S] bool, where the engine takes one."""
    trees: TreeBuffers | None = None
    """The token trees of a base engine that verifies them."""
    hidden_states: Tensor | None = None
    """What a base gives, [max batch, S, output_hidden_dim], or a draft, [max batch, K, H]."""
    hidden_states_input: Tensor | None = None
    """A draft: [max batch, S, base_hidden_dim]."""
    hidden_states_from_draft: Tensor | None = None
    """A draft: [max batch, S, H], zeros: a proposal's steps have its own."""
    proposal_hidden_input: Tensor | None = None
    """A draft: [max batch, P, base_hidden_dim], zeros: `hidden_states_input` of these steps."""
    proposal: ProposalBuffers | None = None
    """A draft: the tree that it is proposing."""

    @classmethod
    def create_for_llm(cls, config: LLMEngineRunnerConfig, device: Device) -> "PipelineIO":
        """Allocate the buffers of a decoder engine, with trees where it verifies them."""
        nodes = max(1, config.max_verify_tree_size)
        batch = config.max_supported_batch_size
        sizes = StepSizes(batch, max(config.prefill_chunk, nodes), nodes)
        io = cls()
        allocate_basic_io(io, config, device, sizes)
        if nodes > 1:
            io.trees = _allocate_trees(device, batch, nodes)
        if config.enable_eagle_spec_decode:
            shape = (batch, sizes.tokens, config.output_hidden_dim)
            io.hidden_states = device.zeros("hidden_states", shape, numpy_dtype(config.dtype))
        return io

    @classmethod
    def create_for_spec_decode_draft(
        cls,
        config: LLMEngineRunnerConfig,
        device: Device,
        drafting: EagleDraftingConfig,
        full_ids: Tensor | None,
    ) -> "PipelineIO":
        """Allocate the buffers of an EAGLE-3 draft engine for trees of `drafting`."""
        batch, top_k = config.max_supported_batch_size, drafting.drafting_top_k
        longest = max(config.prefill_chunk, drafting.proposal_size, drafting.most_accepted)
        io = cls()
        allocate_basic_io(io, config, device, StepSizes(batch, longest, top_k))
        data = numpy_dtype(config.dtype)

        def zeros(name: str, *shape: int, dtype: np.dtype[Any] = data) -> Tensor:
            return device.zeros(name, (batch, *shape), dtype)

        io.hidden_states = zeros("hidden_states", top_k, config.hidden_size)
        io.hidden_states_input = zeros("hidden_states_input", longest, config.base_hidden_dim)
        io.hidden_states_from_draft = zeros("hidden_states_from_draft", longest, config.hidden_size)
        slots, entries = drafting.proposal_size, drafting.table_size
        io.proposal_hidden_input = zeros("hidden_states_input", slots, config.base_hidden_dim)
        io.proposal = ProposalBuffers(
            logits=io.output_logits,
            hidden_out=io.hidden_states,
            hidden_in=zeros("hidden_states_from_draft", slots, config.hidden_size),
            full_ids=full_ids,
            ids=zeros("proposal_ids", slots, dtype=_ID),
            parents=zeros("proposal_parents", slots, dtype=_ID),
            entries=zeros("proposal_entries", slots, dtype=_ID),
            table_ids=zeros("table_ids", entries, dtype=_ID),
            table_parents=zeros("table_parents", entries, dtype=_ID),
            table_scores=zeros("table_scores", entries, dtype=_SCORE),
        )
        return io

    def of_proposal(self) -> "PipelineIO":
        """These buffers as the steps of a proposal bind them; raises `internal` for no draft."""
        if self.proposal is None:
            raise HearthError("internal", "these step buffers are not those of a draft engine")
        own = copy(self)
        own.hidden_states_input = self.proposal_hidden_input
        own.hidden_states_from_draft = self.proposal.hidden_in
        return own


def step_buffers(io: PipelineIO, table: Tensor, start: Tensor) -> StepBuffers:
    """What fills a step of these buffers: the embedding table, and the cache's filled slots."""
    return StepBuffers(
        table=table,
        next_tokens=io.next_tokens,
        embeds=io.inputs_embeds,
        positions=io.position_ids,
        select=io.select_token_indices,
        start=start,
        mask=io.tree_mask,
    )


def allocate_basic_io(
    io: PipelineIO, config: LLMEngineRunnerConfig, device: Device, sizes: StepSizes
) -> None:
    """Allocate what every decoder engine needs."""
    batch, tokens, selected = sizes
    data, index = numpy_dtype(config.dtype), index_dtype(config)
    io.inputs_embeds = device.zeros("inputs_embeds", (batch, tokens, config.hidden_size), data)
    io.output_logits = device.zeros("logits", (batch, selected, config.output_vocab_size), _SCORE)
    io.next_tokens = device.zeros("next_tokens", (batch,), _ID)
    io.select_token_indices = device.zeros("last_token_ids", (batch, selected), index)
    io.position_ids = device.zeros("attention_pos_id", (batch, tokens), index)
    io.host_context_lengths = Tensor.zeros("context_lengths", (batch,), index)
    if config.takes_tree_mask:
        io.tree_mask = device.zeros("tree_mask", (batch, tokens, tokens), np.dtype(np.bool_))
    if config.dialect == "classic":
        rows = (batch, config.num_kv_heads, tokens, config.head_dim)
        cache = numpy_dtype(config.kv_cache_dtype)
        layers = range(config.num_attention_layers)
        io.new_keys = tuple(device.zeros(f"present_k_cache_{i}", rows, cache) for i in layers)
        io.new_values = tuple(device.zeros(f"present_v_cache_{i}", rows, cache) for i in layers)


def build_tensor_map(
    tensors: TensorMap, io: PipelineIO, resources: SharedResources, cache_index: int = 0
) -> None:
    """Name every buffer as the engine binds it.

    `cache_index` 0 means the base engine's caches and rotary tables, 1 the draft's. In the native
    dialect an output cache is the input cache itself.
    """
    caches = resources.cache_managers[cache_index]
    for tensor in (
        io.inputs_embeds,
        io.output_logits,
        io.select_token_indices,
        io.position_ids,
        io.tree_mask,
        io.hidden_states,
        io.hidden_states_input,
        io.hidden_states_from_draft,
        caches.lengths,
        *resources.rope_tables[cache_index],
    ):
        if tensor is not None:
            tensors.set(tensor.name, tensor)
    for layer in range(len(caches.kv.keys)):
        keys, values = caches.attention_layer(layer)
        new_keys = io.new_keys[layer] if io.new_keys else keys
        new_values = io.new_values[layer] if io.new_values else values
        tensors.set(f"k_cache_{layer}", keys)
        tensors.set(f"v_cache_{layer}", values)
        tensors.set(f"present_k_cache_{layer}", new_keys)
        tensors.set(f"present_v_cache_{layer}", new_values)


def _allocate_trees(device: Device, batch: int, nodes: int) -> TreeBuffers:
    return TreeBuffers(
        ids=device.zeros("tree_ids", (batch, nodes), _ID),
        parents=device.zeros("tree_parents", (batch, nodes), _ID),
        packed_mask=device.zeros("packed_tree_mask", (batch, nodes, -(-nodes // 32)), _ID),
    )
