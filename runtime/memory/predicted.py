"""Memory by part, predicted from the configuration alone."""

from msgspec import structs

from runtime.config import LLMEngineRunnerConfig
from runtime.engine_folder import PLAN_FILE
from runtime.memory import sizes
from runtime.memory.sizes import ITEM_BYTES
from runtime.memory.step_scratch import predicted_scratch
from runtime.options import EagleDraftingConfig
from runtime.tensors.buckets import doubled_sizes

_MIB = 1 << 20

# On the CPU, measured: interpreter, libraries and an empty session.
_PROCESS_BYTES = 120 * _MIB
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

# On a GPU: an empty context with its stream, the ops of a step loaded.
_CONTEXT_BYTES = 520 * _MIB
# What an engine's library takes for itself: kernels as they are loaded, and its workspaces.
_LIBRARY_BYTES = {"onnxruntime": 330 * _MIB, "tensorrt": 60 * _MIB}
# The same for a second engine in the process, with the captured rounds of speculation.
_DRAFT_LIBRARY_BYTES = {"onnxruntime": 220 * _MIB, "tensorrt": 60 * _MIB}
# What draws are put together in, by bins and lists of tokens.
_DRAW_BYTES = 6 * _MIB
# Copies of a step's activations that are alive at once, in elements of the engine's type.
_GPU_ACTIVATION_COPIES = 1.5
_GPU_SCORE_COPIES = {"native": 2.0, "classic": 3.0}
# Interpreter and the libraries of CUDA on the host.
_HOST_BYTES = 900 * _MIB
_PINNED_BYTES = 2 * _MIB
# Embeddings on their way into a step.
_IMAGE_PINNED_BYTES = 8 * _MIB


def predict_memory(
    config: LLMEngineRunnerConfig, *, max_batch: int, capacity: int
) -> dict[str, int]:
    """Bytes by part of a running engine with `max_batch` rows of `capacity` cache slots.

    The memory is that of the engine's device. On the CPU the embedding table is mapped from its
    file and counted whole, though only the rows of tokens that occur become resident. On a GPU it
    lies beside the weights, and a tied head is a second copy: the engine owns its weights. The
    step's scratch memory is that of the longest prefill chunk.
    """
    simulated = config.backend == "simulated"
    parts = {
        "embedding": sizes.embedding_bytes(config),
        "kv_cache": sizes.kv_cache_bytes(config, max_batch, capacity),
        "rope": sizes.rope_bytes(config, max_batch, capacity),
        "step_buffers": sizes.step_buffer_bytes(config, max_batch),
    }
    if zeros := sizes.zero_bytes(config, max_batch):
        parts["zeros"] = zeros
    tokens = sizes.longest_step(config)
    if config.device == "cuda":
        scratch = cuda_scratch_bytes(config, max_batch, tokens, capacity)
        return {
            "context": _CONTEXT_BYTES,
            "library": _LIBRARY_BYTES.get(config.backend, 0),
            "weights": 0 if simulated else cuda_weight_bytes(config),
            **parts,
            # How often each token occurred, and its bias.
            "sampler": _DRAW_BYTES + max_batch * (4 + 4) * config.output_vocab_size,
            "engine_scratch": 0 if simulated else scratch,
            "prompt_graphs": sizes.prompt_graph_bytes(
                structs.replace(config, max_supported_batch_size=max_batch)
            ),
        }
    tokens *= max_batch
    scores = _score_bytes(config, tokens, capacity, _SCORE_COPIES[config.dialect])
    return {
        "process": _PROCESS_BYTES,
        "weights": 0 if simulated else _resident_weights(config),
        **parts,
        "attention_scratch": 0 if simulated else scores,
        "activations": 0 if simulated else _activation_bytes(config, tokens, _ACTIVATION_COPIES),
    }


def predict_draft_memory(
    config: LLMEngineRunnerConfig, drafting: EagleDraftingConfig, *, max_batch: int, capacity: int
) -> dict[str, int]:
    """Bytes by part of a draft engine beside its base, whose embedding table it reads."""
    tokens = sizes.longest_draft_step(config, drafting)
    parts: dict[str, int] = {}
    if config.device == "cuda":
        parts["draft_library"] = _DRAFT_LIBRARY_BYTES.get(config.backend, 0)
        weights = cuda_weight_bytes(config)
        scratch = cuda_scratch_bytes(config, max_batch, tokens, capacity)
    else:
        weights = _resident_weights(config)
        tokens *= max_batch
        scratch = _score_bytes(config, tokens, capacity, _DRAFT_SCORE_COPIES[config.dialect])
        scratch += _activation_bytes(config, tokens, _DRAFT_ACTIVATION_COPIES)
    return parts | {
        "draft_weights": weights,
        "draft_kv_cache": sizes.kv_cache_bytes(config, max_batch, capacity),
        "draft_rope": sizes.rope_bytes(config, max_batch, capacity),
        "draft_buffers": sizes.draft_buffer_bytes(config, drafting, max_batch),
        "draft_zeros": sizes.draft_zero_bytes(config, drafting, max_batch),
        "draft_scratch": scratch,
    }


def _score_bytes(config: LLMEngineRunnerConfig, tokens: int, capacity: int, copies: float) -> int:
    slots = capacity
    if config.dialect == "native":
        # What served a smaller bucket of the cache is too small for the next but one, and is not
        # given back; the many pieces of the classic dialect's attention find use for it.
        slots = sum(doubled_sizes(capacity))
    scores = tokens * config.num_attention_heads * slots * ITEM_BYTES[config.dtype]
    mask = tokens * slots * _MASK_BYTES if config.takes_tree_mask else 0
    return int(scores * copies) + mask


def _activation_bytes(config: LLMEngineRunnerConfig, tokens: int, copies: float) -> int:
    return int(tokens * 2 * config.intermediate_size * 4 * copies)


def _resident_weights(config: LLMEngineRunnerConfig) -> int:
    # float16 is widened when a session on the CPU opens.
    packed = sizes.weight_bytes(config, 4, 4 * _NUMBERS_PER_BLOCK)
    # ONNX Runtime 1.23, which the classic dialect is for, keeps the stored form beside it.
    stored = config.dialect == "classic" and config.weight_block_size > 0
    return packed + (sizes.projection_bytes(config) if stored else 0)


def predict_cuda_host_memory(config: LLMEngineRunnerConfig) -> dict[str, int]:
    """Bytes of host memory by part while an engine of a GPU runs.

    Opening the engine reads its weights through the host: they are counted as if all were there
    at once, though most of it are pages of the file that the system can drop.
    """
    simulated = config.backend == "simulated"
    return {
        "process": _HOST_BYTES,
        "weights_while_loading": 0 if simulated else cuda_weight_bytes(config),
        "pinned": _PINNED_BYTES + (_IMAGE_PINNED_BYTES if config.image_token_id else 0),
    }


def cuda_weight_bytes(config: LLMEngineRunnerConfig) -> int:
    """Weights of the matrix products in the engine's type, and the gains of the norms.

    A plan is its weights and its kernels: where it is there, its size is known. An engine that
    binds its weights has them beside it, and a tied head is the embedding table itself.
    """
    plan = config.files.get(PLAN_FILE)
    if plan is not None or config.backend == "kernels":
        return (0 if plan is None else plan.bytes) + sizes.bound_bytes(config)
    gains = config.num_decoder_layers * (2 * config.hidden_size + 2 * config.head_dim)
    elements = sizes.projection_elements(config) + gains + config.hidden_size
    return elements * ITEM_BYTES[config.dtype]


def cuda_scratch_bytes(config: LLMEngineRunnerConfig, rows: int, tokens: int, capacity: int) -> int:
    """A step of `rows` rows of `tokens` tokens: activations, scores, mask and logits.

    A plan knows what its largest step takes, whatever is asked.
    """
    if config.plan is not None and config.plan.scratch_bytes is not None:
        return config.plan.scratch_bytes
    if config.backend == "kernels":
        return predicted_scratch(config, rows, tokens, capacity)
    masked = config.takes_tree_mask
    every = tokens * rows
    heads = config.num_attention_heads + 2 * config.num_kv_heads
    wide = 3 * config.hidden_size + 3 * config.intermediate_size + heads * config.head_dim
    wide += config.base_hidden_dim
    scores = every * config.num_attention_heads * capacity
    group = config.num_attention_heads // config.num_kv_heads
    mask = every * group * capacity if masked else 0
    head = rows * max(1, config.max_verify_tree_size) * config.output_vocab_size
    elements = every * wide * _GPU_ACTIVATION_COPIES + scores * _GPU_SCORE_COPIES[config.dialect]
    return int((elements + mask + head) * ITEM_BYTES[config.dtype])
