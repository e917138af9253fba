"""Bytes of what every engine holds, from its configuration alone."""

from runtime.config import DType, LLMEngineRunnerConfig
from runtime.engine_folder import EMBEDDING_FILE

ITEM_BYTES: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
WEIGHT_BITS = {"int8": 8, "int4": 4}


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
    elements = projection_elements(config)
    item = ITEM_BYTES[config.dtype]
    if config.weight_quantization == "none":
        return elements * item
    integers = elements * WEIGHT_BITS[config.weight_quantization] // 8
    return integers + elements // config.weight_block_size * item


def embedding_bytes(config: LLMEngineRunnerConfig) -> int:
    """The table of all tokens' embedded forms, as its file has it."""
    record = config.files.get(EMBEDDING_FILE)
    table = config.vocab_size * config.hidden_size * ITEM_BYTES[config.dtype]
    return table if record is None else record.bytes


def kv_cache_bytes(config: LLMEngineRunnerConfig, max_batch: int, capacity: int) -> int:
    """Keys and values of `max_batch` rows of `capacity` slots in all layers."""
    slot = 2 * config.num_attention_layers * config.num_kv_heads * config.head_dim
    return max_batch * capacity * slot * ITEM_BYTES[config.kv_cache_dtype]


def rope_bytes(config: LLMEngineRunnerConfig, capacity: int) -> int:
    """Both rotary tables, float32."""
    return capacity * config.rotary_dim * 4


def step_buffer_bytes(config: LLMEngineRunnerConfig, max_batch: int) -> int:
    """The buffers that a step reads and writes, allocated once at their largest size."""
    tokens = max_batch * config.prefill_chunk
    embeds = tokens * config.hidden_size * ITEM_BYTES[config.dtype]
    logits = max_batch * config.output_vocab_size * 4
    positions = tokens * 8
    if config.dialect == "native":
        return embeds + logits + positions
    rows = 2 * config.num_attention_layers * config.num_kv_heads * config.head_dim
    return embeds + logits + positions + tokens * rows * ITEM_BYTES[config.kv_cache_dtype]
