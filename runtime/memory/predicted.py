"""Memory by part, predicted from the configuration alone."""

from runtime.config import LLMEngineRunnerConfig
from runtime.memory.cuda import (
    cuda_draft_library_bytes,
    cuda_scratch_bytes,
    cuda_weight_bytes,
    predict_cuda_memory,
)
from runtime.memory.sizes import (
    ITEM_BYTES,
    WEIGHT_BITS,
    draft_buffer_bytes,
    embedding_bytes,
    kv_cache_bytes,
    longest_draft_step,
    longest_step,
    projection_bytes,
    projection_elements,
    rope_bytes,
    step_buffer_bytes,
)
from runtime.options import EagleDraftingConfig
from runtime.tensors.buckets import bucket_sizes

# Interpreter, libraries and an empty session, measured.
_PROCESS_BYTES = 120 << 20
# Once ONNX Runtime has packed quantised weights it holds the integers once, and in float32 three
# numbers a block: the scale as stored, the scale as packed, and a sum.
_NUMBERS_PER_BLOCK = 3
# Copies alive at once, measured: attention scores [B, Hq, S, C], and activations as wide as the
# fused gate and up projection [B, S, 2 I]; fewer in a draft, which has one layer.
_SCORE_COPIES = {"native": 1.3, "classic": 4.7}
_ACTIVATION_COPIES = 4.0
_DRAFT_SCORE_COPIES = {"native": 1.0, "classic": 5.2}
_DRAFT_ACTIVATION_COPIES = 3.0
# Of a tree mask [B, S, C].
_MASK_BYTES = 2


def predict_memory(
    config: LLMEngineRunnerConfig, *, max_batch: int, capacity: int
) -> dict[str, int]:
    """Bytes by part of a running engine with `max_batch` rows of `capacity` cache slots.

    The memory is that of the engine's device; on a GPU see `predict_cuda_memory`. On the CPU the
    embedding table is mapped from its file and counted whole, though only the rows of tokens that
    occur become resident. The step's scratch memory is that of the longest prefill chunk.
    """
    if config.device == "cuda":
        return predict_cuda_memory(config, max_batch=max_batch, capacity=capacity)
    tokens = max_batch * longest_step(config)
    simulated = config.backend == "simulated"
    return {
        "process": _PROCESS_BYTES,
        "weights": 0 if simulated else _resident_weights(config),
        "embedding": embedding_bytes(config),
        "kv_cache": kv_cache_bytes(config, max_batch, capacity),
        "rope": rope_bytes(config, capacity),
        "step_buffers": step_buffer_bytes(config, max_batch),
        "attention_scratch": 0
        if simulated
        else _score_bytes(config, tokens, capacity, _SCORE_COPIES[config.dialect]),
        "activations": 0 if simulated else _activation_bytes(config, tokens, _ACTIVATION_COPIES),
    }


def predict_draft_memory(
    config: LLMEngineRunnerConfig, drafting: EagleDraftingConfig, *, max_batch: int, capacity: int
) -> dict[str, int]:
    """Bytes by part of a draft engine beside its base, whose embedding table it reads."""
    tokens = longest_draft_step(config, drafting)
    parts: dict[str, int] = {}
    if config.device == "cuda":
        parts["draft_library"] = cuda_draft_library_bytes(config)
        weights = cuda_weight_bytes(config)
        scratch = cuda_scratch_bytes(config, max_batch, tokens, capacity)
    else:
        weights = _resident_weights(config)
        tokens *= max_batch
        scratch = _score_bytes(config, tokens, capacity, _DRAFT_SCORE_COPIES[config.dialect])
        scratch += _activation_bytes(config, tokens, _DRAFT_ACTIVATION_COPIES)
    return parts | {
        "draft_weights": weights,
        "draft_kv_cache": kv_cache_bytes(config, max_batch, capacity),
        "draft_rope": rope_bytes(config, capacity),
        "draft_buffers": draft_buffer_bytes(config, drafting, max_batch),
        "draft_scratch": scratch,
    }


def _score_bytes(config: LLMEngineRunnerConfig, tokens: int, capacity: int, copies: float) -> int:
    slots = capacity
    if config.dialect == "native":
        # What served a smaller bucket of the cache is too small for the next, and is not given
        # back; the many pieces of the classic dialect's attention find use for it.
        slots = sum(bucket_sizes(capacity, "cpu"))
    scores = tokens * config.num_attention_heads * slots * ITEM_BYTES[config.dtype]
    mask = tokens * slots * _MASK_BYTES if config.takes_tree_mask else 0
    return int(scores * copies) + mask


def _activation_bytes(config: LLMEngineRunnerConfig, tokens: int, copies: float) -> int:
    return int(tokens * 2 * config.intermediate_size * 4 * copies)


def _resident_weights(config: LLMEngineRunnerConfig) -> int:
    elements = projection_elements(config)
    if config.weight_quantization == "none":
        return elements * 4  # float16 is widened when a session on the CPU opens
    integers = elements * WEIGHT_BITS[config.weight_quantization] // 8
    packed = integers + elements // config.weight_block_size * 4 * _NUMBERS_PER_BLOCK
    # ONNX Runtime 1.23, which the classic dialect is for, keeps the stored form beside it.
    return packed + (projection_bytes(config) if config.dialect == "classic" else 0)
