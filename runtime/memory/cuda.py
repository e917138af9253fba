"""Memory of a GPU by part, predicted from the configuration alone, and that of its host."""

from runtime.config import LLMEngineRunnerConfig
from runtime.engine_folder import PLAN_FILE
from runtime.memory.sizes import (
    ITEM_BYTES,
    embedding_bytes,
    kv_cache_bytes,
    longest_step,
    projection_elements,
    rope_bytes,
    step_buffer_bytes,
)

MIB = 1 << 20
# An empty context with its stream, the ops of a step loaded.
_CONTEXT_BYTES = 520 * MIB
# What an engine's library takes for itself: kernels as they are loaded, and its workspaces.
_LIBRARY_BYTES = {"onnxruntime": 330 * MIB, "tensorrt": 60 * MIB}
# The same for a second engine in the process, with the captured rounds of speculation.
_DRAFT_LIBRARY_BYTES = {"onnxruntime": 220 * MIB, "tensorrt": 60 * MIB}
# Copies of a step's activations that are alive at once, in elements of the engine's type.
_ACTIVATION_COPIES = 1.5
_SCORE_COPIES = {"native": 2.0, "classic": 3.0}
# Interpreter and the libraries of CUDA on the host.
_HOST_BYTES = 900 * MIB
_PINNED_BYTES = 2 * MIB


def predict_cuda_memory(
    config: LLMEngineRunnerConfig, *, max_batch: int, capacity: int
) -> dict[str, int]:
    """Bytes of device memory by part; the scratch memory is that of the longest prefill chunk.

    The embedding table lies on the device beside the weights, a tied head is a second copy: the
    engine owns its weights.
    """
    simulated = config.backend == "simulated"
    return {
        "context": _CONTEXT_BYTES,
        "library": _LIBRARY_BYTES.get(config.backend, 0),
        "weights": 0 if simulated else cuda_weight_bytes(config),
        "embedding": embedding_bytes(config),
        "kv_cache": kv_cache_bytes(config, max_batch, capacity),
        "rope": rope_bytes(config, capacity),
        "step_buffers": step_buffer_bytes(config, max_batch),
        "sampler": _sampler_bytes(config, max_batch),
        "engine_scratch": 0
        if simulated
        else cuda_scratch_bytes(config, max_batch, longest_step(config), capacity),
    }


def predict_cuda_host_memory(config: LLMEngineRunnerConfig) -> dict[str, int]:
    """Bytes of host memory by part while an engine of a GPU runs.

    Opening the engine reads its weights through the host: they are counted as if all were there
    at once, though most of it are pages of the file that the system can drop.
    """
    simulated = config.backend == "simulated"
    return {
        "process": _HOST_BYTES,
        "weights_while_loading": 0 if simulated else cuda_weight_bytes(config),
        "pinned": _PINNED_BYTES,
    }


def cuda_weight_bytes(config: LLMEngineRunnerConfig) -> int:
    """Weights of the matrix products in the engine's type, and the gains of the norms.

    A plan is its weights and its kernels: where it is there, its size is known.
    """
    plan = config.files.get(PLAN_FILE)
    if plan is not None:
        return plan.bytes
    gains = config.num_decoder_layers * (2 * config.hidden_size + 2 * config.head_dim)
    elements = projection_elements(config) + gains + config.hidden_size
    return elements * ITEM_BYTES[config.dtype]


def cuda_draft_library_bytes(config: LLMEngineRunnerConfig) -> int:
    """What a draft's engine takes beside its base's, weights and buffers not among it."""
    return _DRAFT_LIBRARY_BYTES.get(config.backend, 0)


def _sampler_bytes(config: LLMEngineRunnerConfig, max_batch: int) -> int:
    # How often each token occurred, its bias, and one bit that allows it.
    tokens = config.output_vocab_size
    return max_batch * (4 * tokens + 4 * tokens + -(-tokens // 8))


def cuda_scratch_bytes(config: LLMEngineRunnerConfig, rows: int, tokens: int, capacity: int) -> int:
    """A step of `rows` rows of `tokens` tokens: activations, scores, mask and logits.

    A plan knows what its largest step takes, whatever is asked. ONNX Runtime's own attention
    keeps no scores, and its prefill takes one row at a time; an engine that takes a tree mask has
    matrix products in its place.
    """
    if config.plan is not None and config.plan.scratch_bytes is not None:
        return config.plan.scratch_bytes
    masked = config.takes_tree_mask
    fused = config.operators == "contrib" and not masked
    every = tokens * (1 if fused else rows)
    heads = config.num_attention_heads + 2 * config.num_kv_heads
    wide = 3 * config.hidden_size + 3 * config.intermediate_size + heads * config.head_dim
    wide += config.base_hidden_dim
    scores = 0 if fused else every * config.num_attention_heads * capacity
    group = config.num_attention_heads // config.num_kv_heads
    mask = every * group * capacity if masked else 0
    head = rows * max(1, config.max_verify_tree_size) * config.output_vocab_size
    elements = every * wide * _ACTIVATION_COPIES + scores * _SCORE_COPIES[config.dialect]
    return int((elements + mask + head) * ITEM_BYTES[config.dtype])
