"""Bytes of what every engine holds, from its configuration alone."""

from collections.abc import Sequence

from runtime.config import DType, LLMEngineRunnerConfig
from runtime.engine_folder import EMBEDDING_FILE
from runtime.options import EagleDraftingConfig
from runtime.tensors.lora import lora_inputs
from runtime.tensors.profiles import captured_prompts

ITEM_BYTES: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
_WEIGHT_BITS = {"int8": 8, "int4": 4}
# What a captured graph takes for each of its kernels, and how many of these a step has.
_KERNEL_BYTES = 3300
_LAYER_KERNELS = 14
# More where rows have rotary tables of their own: products, norms and turns stand apart.
_APART_KERNELS = 6
_OTHER_KERNELS = 8
# For each product that adapters add to: two products and a sum.
_ADAPTER_KERNELS = 3


def projection_elements(config: LLMEngineRunnerConfig) -> int:
    """Weights of all matrix products, the head included."""
    heads = 2 * config.num_attention_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * heads * config.head_dim
    if config.base_hidden_dim:  # A draft reads two vectors a token, and fuses the base's first.
        wide = config.num_attention_heads + 2 * config.num_kv_heads
        attention += config.hidden_size * (wide * config.head_dim + config.base_hidden_dim)
    mlp = 3 * config.hidden_size * config.intermediate_size
    head = config.hidden_size * config.output_vocab_size
    return config.num_decoder_layers * (attention + mlp) + head


def projection_bytes(config: LLMEngineRunnerConfig) -> int:
    """Bytes of these weights, with their scales, as the engine folder stores them."""
    item = ITEM_BYTES[config.dtype]
    return weight_bytes(config, item, item)


def weight_bytes(config: LLMEngineRunnerConfig, whole: int, per_block: int) -> int:
    """Bytes of these weights, if each that is not quantised takes `whole` of them.

    Others take their bits, and a block of them `per_block` bytes beside.
    """
    head = config.hidden_size * config.output_vocab_size
    body = projection_elements(config) - head
    size = 0
    for elements, kind in ((body, config.weight_quantization), (head, config.head_weights)):
        if kind == "none":
            size += elements * whole
        else:
            size += elements * _WEIGHT_BITS[kind] // 8
            size += elements // config.weight_block_size * per_block
    return size


def embedding_bytes(config: LLMEngineRunnerConfig) -> int:
    """The table of all tokens' embedded forms, as its file has it.

    Of external weights it is what they have beside the products, unless a head reads it.
    """
    if config.base_hidden_dim:  # A draft reads its base's.
        return 0
    record = config.files.get(EMBEDDING_FILE)
    item = ITEM_BYTES[config.embedding_dtype or config.dtype]
    table = config.vocab_size * config.hidden_size * item
    if record is None and (stored := _external_bytes(config)):
        beside = stored - weights_head_bytes(config.num_decoder_layers) - projection_bytes(config)
        return min(table, beside) if beside > table // 4 else table
    return table if record is None else record.bytes


def bound_bytes(config: LLMEngineRunnerConfig) -> int:
    """External weights of an engine that binds them, without the embedding table."""
    return max(0, _external_bytes(config) - embedding_bytes(config))


def weights_head_bytes(layers: int) -> int:
    """What comes before the data of a file of external weights: names and known answer fit in."""
    return 4096 * (4 + layers)


def _external_bytes(config: LLMEngineRunnerConfig) -> int:
    records = (config.files.get(name) for name in config.external_weight_files)
    return sum(record.bytes for record in records if record is not None)


def kv_cache_bytes(config: LLMEngineRunnerConfig, max_batch: int, capacity: int) -> int:
    """Keys and values of `max_batch` rows of `capacity` slots in all layers."""
    slot = 2 * config.num_attention_layers * config.num_kv_heads * config.head_dim
    return max_batch * capacity * slot * ITEM_BYTES[config.kv_cache_dtype]


def rope_bytes(config: LLMEngineRunnerConfig, max_batch: int, capacity: int) -> int:
    """Both rotary tables, float32: those of all rows, which those of each are filled from."""
    tables = 1 + max_batch if config.use_context_dependent_rope else 1
    return tables * capacity * config.rotary_dim * 4


def step_buffer_bytes(config: LLMEngineRunnerConfig, max_batch: int) -> int:
    """The buffers of a decoder's steps: those of `PipelineIO.create_for_llm`."""
    nodes = max(1, config.max_verify_tree_size)
    tokens = longest_step(config)
    size = _basic_bytes(config, max_batch, tokens, nodes)
    size += max_batch * nodes * 2 * 4
    if config.num_deepstack_features:
        places = max_batch * config.num_deepstack_features * tokens
        size += places * config.hidden_size * ITEM_BYTES[config.dtype]
    if config.enable_eagle_spec_decode:
        places = max_batch * (config.prefill_chunk + nodes + 1)
        size += places * config.output_hidden_dim * ITEM_BYTES[config.dtype]
    return size


def draft_buffer_bytes(
    config: LLMEngineRunnerConfig, drafting: EagleDraftingConfig, max_batch: int
) -> int:
    """Those of `DraftIO.create_for_spec_decode_draft`, and the draft's own vocabulary."""
    tokens = longest_draft_step(config, drafting)
    size = _basic_bytes(config, max_batch, tokens, drafting.drafting_top_k)
    # Steps of entries are given the base's hidden states, those of a proposal the draft's own.
    hidden = (drafting.drafting_top_k + drafting.proposal_size) * config.hidden_size
    hidden += tokens * config.base_hidden_dim
    numbers = 3 * (drafting.proposal_size + drafting.table_size)
    # A proposal's steps have a start of their own.
    start = _index_bytes(config)
    size += max_batch * (hidden * ITEM_BYTES[config.dtype] + numbers * 4 + start)
    own = config.output_vocab_size != config.vocab_size
    return size + (config.output_vocab_size * 4 if own else 0)


def zero_bytes(config: LLMEngineRunnerConfig, max_batch: int) -> int:
    """What the steps of a decoder bind of the buffer of zeros: deepstack features of no image."""
    if not config.num_deepstack_features:
        return 0
    places = max_batch * max(1, config.max_verify_tree_size)
    return places * config.hidden_size * ITEM_BYTES[config.dtype]


def draft_zero_bytes(
    config: LLMEngineRunnerConfig, drafting: EagleDraftingConfig, max_batch: int
) -> int:
    """What those of a draft do: a step has its own hidden states or the base's, never both."""
    entries = longest_draft_step(config, drafting) * config.hidden_size
    largest = max(entries, unread_base_states(config, drafting) * config.base_hidden_dim)
    return max_batch * largest * ITEM_BYTES[config.dtype]


def unread_base_states(config: LLMEngineRunnerConfig, drafting: EagleDraftingConfig) -> int:
    """Hidden states of the base, a row, that steps of a proposal bind and that are zeros."""
    return 0 if config.backend == "kernels" else drafting.proposal_size


def adapter_bytes(config: LLMEngineRunnerConfig, stored: Sequence[int]) -> int:
    """Those of adapters of so many bytes in files; on a GPU all have the greatest rank, and slots.

    Where an input joins projections there are zeros beside the diagonal, which no file has; kernels
    do without them.
    """
    inputs = lora_inputs(config)
    joined = sum(one.numbers for one in inputs)
    if config.device == "cuda":
        return (1 + len(stored)) * joined * ITEM_BYTES[config.dtype]
    ranks = ((one, one.rank // len(one.targets)) for one in inputs)
    apart = sum(rank * (len(one.targets) * one.inputs + sum(one.outputs)) for one, rank in ranks)
    return sum(stored) * joined // max(1, apart)


def prompt_graph_bytes(config: LLMEngineRunnerConfig) -> int:
    """Those of the prefill steps that are captured."""
    layer = _LAYER_KERNELS + _ADAPTER_KERNELS * len(config.lora_targets)
    if config.use_context_dependent_rope:
        layer += _APART_KERNELS
    kernels = layer * config.num_decoder_layers + _OTHER_KERNELS
    return len(captured_prompts(config)) * kernels * _KERNEL_BYTES


def longest_step(config: LLMEngineRunnerConfig) -> int:
    """Tokens of a row in the longest step of a decoder."""
    return max(config.prefill_chunk, config.max_verify_tree_size)


def longest_draft_step(config: LLMEngineRunnerConfig, drafting: EagleDraftingConfig) -> int:
    """Tokens of a row in the longest step of a draft engine."""
    return max(config.prefill_chunk, drafting.proposal_size, drafting.most_accepted)


def _index_bytes(config: LLMEngineRunnerConfig) -> int:
    return 8 if config.dialect == "native" else 4


def _basic_bytes(config: LLMEngineRunnerConfig, max_batch: int, tokens: int, selected: int) -> int:
    """Embeddings, logits, newest tokens, starts, selection, positions, mask and new K/V rows."""
    index = _index_bytes(config)
    row = tokens * config.hidden_size * ITEM_BYTES[config.dtype]
    row += selected * (config.output_vocab_size * 4 + index)
    row += 4 + (1 + tokens) * index
    if config.takes_packed_mask:
        row += tokens * -(-tokens // 32) * 4
    elif config.takes_tree_mask:
        row += tokens * tokens
    if config.dialect == "classic":
        slot = 2 * config.num_attention_layers * config.num_kv_heads * config.head_dim
        row += tokens * slot * ITEM_BYTES[config.kv_cache_dtype]
    return max_batch * row
