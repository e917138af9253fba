"""Bytes of what every engine holds, from its configuration alone."""

from hearth.runtime.config import DType, LLMEngineRunnerConfig
from hearth.runtime.options import EagleDraftingConfig

ITEM_BYTES: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
_WEIGHT_BITS = {"int8": 8, "int4": 4}


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


def weights_head_bytes(layers: int) -> int:
    """Return the bytes before the data of a file of external weights: names and known answer."""
    return 4096 * (4 + layers)


def kv_cache_bytes(config: LLMEngineRunnerConfig, max_batch: int, capacity: int) -> int:
    """Keys and values of `max_batch` rows of `capacity` slots in all layers."""
    slot = 2 * config.num_attention_layers * config.num_kv_heads * config.head_dim
    return max_batch * capacity * slot * ITEM_BYTES[config.kv_cache_dtype]


def longest_step(config: LLMEngineRunnerConfig) -> int:
    """Tokens of a row in the longest step of a decoder."""
    return max(config.prefill_chunk, config.max_verify_tree_size)


def longest_draft_step(config: LLMEngineRunnerConfig, drafting: EagleDraftingConfig) -> int:
    """Tokens of a row in the longest step of a draft engine."""
    return max(config.prefill_chunk, drafting.proposal_size, drafting.most_accepted)
