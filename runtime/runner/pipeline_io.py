from math import prod
from typing import Any, NamedTuple

import numpy as np

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import Device, ProposalBuffers, StepBuffers, TreeBuffers
from hearth.runtime.memory.sizes import longest_draft_step, longest_step
from hearth.runtime.options import EagleDraftingConfig
from hearth.runtime.reference.token_trees import mask_words
from hearth.runtime.runner.shared_resources import SharedResources, allocate_zero_buffer, zero_bytes
from hearth.runtime.tensors.registry import index_dtype
from hearth.runtime.tensors.tensor import Tensor, TensorMap, numpy_dtype

_ID = np.dtype(np.int32)
_SCORE = np.dtype(np.float32)


class StepSizes(NamedTuple):
    """The largest step: tokens a row (S), and tokens of a row that get logits (N)."""

    tokens: int
    selected: int


class StepIO(NamedTuple):
    """Buffers that the steps of one engine bind beside caches and rotary tables.

    All buffers are allocated once at their largest size, and their addresses stay. A step uses
    the first elements of each as a dense array of its own shape.
    """

    inputs: StepBuffers
    """Inputs that the device's ops fill."""
    logits: Tensor
    """[max batch, N, V], float32."""
    new_keys: tuple[Tensor, ...]
    """Classic dialect: [max batch, kv_heads, S, head_dim] per attention layer."""
    new_values: tuple[Tensor, ...]
    """As `new_keys`."""
    hidden: tuple[Tensor, ...] = ()
    """Hidden states from a base to its draft and from one step of the draft to the next."""
    deepstack: tuple[Tensor, ...] = ()
    """[max batch, S, H] for each deepstack feature; in decode and verify steps zeros for all."""


class PipelineIO(NamedTuple):
    """The buffers of a decoder: its steps, and the trees that some of them verify.

    A base with a draft has `hidden_states` of width W in both kinds of step. Prompt chunks write
    into a buffer [max batch, prefill_chunk, W] of their own. Decode and verify steps write the
    first max batch * N places of a buffer [max batch, N + 1, W]; no step writes its places from
    `waiting` on, which hold hidden states until the draft reads them.
    """

    step: StepIO
    """Decode and verify steps."""
    prompt: StepIO
    """Prompt chunks: the same buffers, but a start index and hidden states of their own."""
    trees: TreeBuffers
    """Trees to verify; one node a row without speculation."""

    @property
    def waiting(self) -> int:
        """First place of `step.hidden`, read flat, for hidden states that wait for the draft."""
        rows, nodes = self.trees.ids.shape
        return rows * nodes

    @classmethod
    def create_for_llm(
        cls, config: LLMEngineRunnerConfig, resources: SharedResources, device: Device
    ) -> "PipelineIO":
        """Allocate the buffers of a decoder engine for its largest chunk and tree."""
        nodes = max(1, config.max_verify_tree_size)
        batch = config.max_supported_batch_size
        sizes = StepSizes(longest_step(config), nodes)
        step = allocate_basic_io(config, resources, device, sizes)
        prompt = own_start(step, device)
        if config.num_deepstack_features:
            step, prompt = _deepstack(config, step, prompt, resources, device)
        if config.enable_eagle_spec_decode:
            step, prompt = (
                one._replace(hidden=(_hidden_states(config, device, places),))
                for one, places in ((step, nodes + 1), (prompt, config.prefill_chunk))
            )
        trees = TreeBuffers(
            ids=device.zeros("tree_ids", (batch, nodes), _ID),
            parents=device.zeros("tree_parents", (batch, nodes), _ID),
        )
        return cls(step, prompt, trees)


class DraftIO(NamedTuple):
    """The buffers of an EAGLE-3 draft, whose two kinds of step differ in their hidden states.

    A step binds zeros for the hidden states that it does not get. `hidden` of both kinds has
    `hidden_states` [max batch, K, H], `hidden_states_input` [max batch, S, base_hidden_dim] and
    `hidden_states_from_draft` [max batch, S, H].
    """

    entries: StepIO
    """Steps that append entries, from the base's hidden states."""
    prompt: StepIO
    """Steps of a prompt chunk: the same buffers, but a start index of their own."""
    growing: StepIO
    """Steps that grow a proposal from the draft's hidden states; a start index of their own."""
    hidden_states_input: Tensor
    """Hidden states that `entries` reads."""
    proposal: ProposalBuffers
    """The tree that is being proposed."""

    @classmethod
    def create_for_spec_decode_draft(
        cls,
        config: LLMEngineRunnerConfig,
        drafting: EagleDraftingConfig,
        resources: SharedResources,
        device: Device,
    ) -> "DraftIO":
        """Allocate the buffers of a draft engine for trees of `drafting`."""
        batch, top_k = config.max_supported_batch_size, drafting.drafting_top_k
        longest = longest_draft_step(config, drafting)
        step = allocate_basic_io(config, resources, device, StepSizes(longest, top_k), 1)
        data = numpy_dtype(config.dtype)

        def zeros(name: str, *shape: int, dtype: np.dtype[Any] = data) -> Tensor:
            return device.zeros(name, (batch, *shape), dtype)

        allocate_zero_buffer(resources, draft_zero_bytes(config, drafting, batch), device)
        out = zeros("hidden_states", top_k, config.hidden_size)
        wide, hidden = config.base_hidden_dim, config.hidden_size
        unread = _unread_base_states(config, drafting)
        given = (
            zeros("hidden_states_input", longest, wide),
            resources.zeros("hidden_states_from_draft", (batch, longest, hidden), data),
        )
        own = (
            resources.zeros("hidden_states_input", (batch, unread, wide), data),
            zeros("hidden_states_from_draft", drafting.proposal_size, hidden),
        )
        slots, table = drafting.proposal_size, drafting.table_size
        proposal = ProposalBuffers(
            logits=step.logits,
            hidden_states=out,
            hidden_states_from_draft=own[1],
            full_ids=resources.full_ids,
            ids=zeros("proposal_ids", slots, dtype=_ID),
            parents=zeros("proposal_parents", slots, dtype=_ID),
            entries=zeros("proposal_entries", slots, dtype=_ID),
            table_ids=zeros("table_ids", table, dtype=_ID),
            table_parents=zeros("table_parents", table, dtype=_ID),
            table_scores=zeros("table_scores", table, dtype=_SCORE),
        )
        entering = step._replace(hidden=(out, *given))
        return cls(
            entries=entering,
            prompt=own_start(entering, device),
            growing=own_start(step._replace(hidden=(out, *own)), device),
            hidden_states_input=given[0],
            proposal=proposal,
        )


def draft_zero_bytes(
    config: LLMEngineRunnerConfig, drafting: EagleDraftingConfig, max_batch: int
) -> int:
    """Bytes of zeros that a draft's steps bind in place of hidden states that they do not get."""
    entries = longest_draft_step(config, drafting) * config.hidden_size
    largest = max(entries, _unread_base_states(config, drafting) * config.base_hidden_dim)
    return max_batch * largest * numpy_dtype(config.dtype).itemsize


def allocate_basic_io(
    config: LLMEngineRunnerConfig,
    resources: SharedResources,
    device: Device,
    sizes: StepSizes,
    cache_index: int = 0,
) -> StepIO:
    """Allocate the buffers that every decoder engine needs."""
    batch, (tokens, selected) = config.max_supported_batch_size, sizes
    data, index = numpy_dtype(config.dtype), index_dtype(config)
    mask = packed = None
    if config.takes_packed_mask:
        packed = device.zeros("packed_mask", (batch, tokens, mask_words(tokens)), _ID)
    elif config.takes_tree_mask:
        mask = device.zeros("tree_mask", (batch, tokens, tokens), np.dtype(np.bool_))
    inputs = StepBuffers(
        embedding=resources.embedding,
        next_tokens=device.zeros("next_tokens", (batch,), _ID),
        inputs_embeds=device.zeros("inputs_embeds", (batch, tokens, config.hidden_size), data),
        attention_pos_id=device.zeros("attention_pos_id", (batch, tokens), index),
        last_token_ids=device.zeros("last_token_ids", (batch, selected), index),
        lengths=resources.cache_managers[cache_index].lengths,
        tree_mask=mask,
        packed_mask=packed,
    )
    logits = device.zeros("logits", (batch, selected, config.output_vocab_size), _SCORE)
    rows = (batch, config.num_kv_heads, tokens, config.head_dim)
    cache = numpy_dtype(config.kv_cache_dtype)
    layers = range(config.num_attention_layers if config.dialect == "classic" else 0)
    new_keys, new_values = (
        tuple(device.zeros(f"present_{kind}_cache_{i}", rows, cache) for i in layers)
        for kind in ("k", "v")
    )
    return StepIO(inputs, logits, new_keys, new_values)


def own_start(step: StepIO, device: Device) -> StepIO:
    """The same step with a start index of its own, whose element 0 is any row."""
    lengths = step.inputs.lengths
    own = device.zeros(lengths.name, lengths.shape, lengths.dtype)
    return step._replace(inputs=step.inputs._replace(lengths=own))


def build_tensor_map(
    tensors: TensorMap,
    step: StepIO,
    resources: SharedResources,
    cache_index: int = 0,
    first: int | None = None,
    *,
    adapter: str = "",
) -> None:
    """Name every buffer as the engine binds it.

    `cache_index` 0 means the base engine's caches and rotary tables, 1 the draft's. In the native
    dialect an output cache is the input cache itself. With `first` the caches, in the bucket in
    use, and rotary tables of every row begin at that row. A base that takes adapters binds the
    inputs of `adapter`.
    """
    caches, inputs = resources.cache_managers[cache_index], step.inputs
    for tensor in (
        inputs.inputs_embeds,
        inputs.attention_pos_id,
        inputs.last_token_ids,
        inputs.lengths,
        *(mask for mask in (inputs.tree_mask, inputs.packed_mask) if mask is not None),
        step.logits,
        *step.hidden,
        *(_from_row(table, first or 0) for table in resources.rope_tables[cache_index]),
    ):
        tensors.set(tensor.name, tensor)
    weights = resources.draft_weights if cache_index else resources.external_weights
    if weights is not None:
        weights.publish(tensors)
    for feature, embeds in enumerate(step.deepstack):
        tensors.set(f"deepstack_embeds_{feature}", embeds)
    if resources.lora is not None and not cache_index:
        for name, tensor in resources.lora.bindings(adapter).items():
            tensors.set(name, tensor)
    for layer in range(len(caches.kv.keys)):
        keys, values = caches.attention_layer(layer)
        if first is not None:
            keys, values = (caches.kv.from_row(one, first) for one in (keys, values))
        tensors.set(f"k_cache_{layer}", keys)
        tensors.set(f"v_cache_{layer}", values)
        tensors.set(f"present_k_cache_{layer}", step.new_keys[layer] if step.new_keys else keys)
        tensors.set(
            f"present_v_cache_{layer}", step.new_values[layer] if step.new_values else values
        )


def _unread_base_states(config: LLMEngineRunnerConfig, drafting: EagleDraftingConfig) -> int:
    """Number of the base's hidden states a row that steps of a proposal bind as zeros."""
    return 0 if config.backend == "kernels" else drafting.proposal_size


def _deepstack(
    config: LLMEngineRunnerConfig,
    step: StepIO,
    prompt: StepIO,
    resources: SharedResources,
    device: Device,
) -> tuple[StepIO, StepIO]:
    """Add deepstack features to both: only prompts have images."""
    features, data = range(config.num_deepstack_features), numpy_dtype(config.dtype)
    rows, selected = step.inputs.last_token_ids.shape
    allocate_zero_buffer(resources, zero_bytes(config, rows), device)
    zeros = resources.zeros("deepstack_zeros", (rows, selected, config.hidden_size), data)
    embeds = tuple(
        device.zeros(f"deepstack_embeds_{one}", step.inputs.inputs_embeds.shape, data)
        for one in features
    )
    return step._replace(deepstack=(zeros,) * len(features)), prompt._replace(deepstack=embeds)


def _from_row(table: Tensor, first: int) -> Tensor:
    """The part of a rotary table that a step binds: from row `first` on if each row has its own."""
    rows, *shape = table.shape
    if not first or len(shape) == 1:
        return table
    return table.part(table.name, first * prod(shape), (rows - first, *shape))


def _hidden_states(config: LLMEngineRunnerConfig, device: Device, places: int) -> Tensor:
    shape = (config.max_supported_batch_size, places, config.output_hidden_dim)
    return device.zeros("hidden_states", shape, numpy_dtype(config.dtype))
