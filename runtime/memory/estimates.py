"""Estimates of what libraries and engines take for themselves, from the configuration alone.

All that Hearth allocates is measured instead (`runtime/generation/measured.py`).
"""

from collections.abc import Sequence

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.engine_folder import DATA_FILE, PLAN_FILE
from hearth.runtime.memory import sizes
from hearth.runtime.memory.sizes import ITEM_BYTES, predicted_scratch
from hearth.runtime.options import EagleDraftingConfig
from hearth.runtime.tensors.lora import lora_inputs
from hearth.runtime.tensors.profiles import captured_prompts, doubled_sizes
from hearth.runtime.vision_config import VisionConfig

_MIB = 1 << 20

# On the CPU, measured: the executor's interpreter, libraries and an empty session, and what the
# daemon has beyond the libraries that both read.
_PROCESS_BYTES = 76 * _MIB
_DAEMON_PROCESS_BYTES = 49 * _MIB
# Once ONNX Runtime has packed quantised weights it holds the integers once, and in float32 three
# numbers a block: the scale as stored, the scale as packed, and a sum.
_NUMBERS_PER_BLOCK = 3
# Copies alive at once, measured: attention scores [B, Hq, S, C], and activations as wide as the
# fused gate and up projection [B, S, 2 I]; fewer in a draft, which has one layer.
_SCORE_COPIES = {"native": 1.3, "classic": 4.7}
_ACTIVATION_COPIES = 4.0
_DRAFT_SCORE_COPIES = {"native": 1.0, "classic": 5.2}
_DRAFT_ACTIVATION_COPIES = 3.0
# Bytes of an element of a tree mask [B, S, C].
_MASK_BYTES = 2

# On a GPU: an empty context with its stream, the ops of a step loaded.
_CONTEXT_BYTES = 520 * _MIB
# Memory of an engine's library itself: kernels as they are loaded, and its workspaces. Products of
# 16 bits have kernels and workspaces that those of float32 do without.
_LIBRARY_BYTES = {"onnxruntime": 280 * _MIB, "tensorrt": 60 * _MIB}
_WIDE_LIBRARY_BYTES = {"onnxruntime": 50 * _MIB}
# The same for a second engine in the process, with the captured rounds of speculation.
_DRAFT_LIBRARY_BYTES = {"onnxruntime": 130 * _MIB, "tensorrt": 60 * _MIB}
# Copies of a step's activations that are alive at once, in elements of the engine's type.
_GPU_ACTIVATION_COPIES = 1.5
_GPU_SCORE_COPIES = {"native": 2.0, "classic": 3.0}
# Interpreter and the libraries of CUDA on the host.
_HOST_BYTES = 900 * _MIB
_PINNED_BYTES = 2 * _MIB
# Token masks of steps in flight, in bits.
_MASK_SLOTS = 4
LOADING = "weights_while_loading"
"""The end of the names of parts that the system can drop: pages of files that are read."""
# Embeddings on their way into a step.
_IMAGE_PINNED_BYTES = 8 * _MIB

# Memory of a vision tower, measured: the encoder, its libraries and an empty session, and the
# process that decodes for it.
_TOWER_PROCESS_BYTES = (120 + 60) * _MIB
TOWER_HOST_PARTS = {"vision_processes": (90 + 60) * _MIB}
"""Parts on the host of a GPU: an encoder without an engine, and its decoding process."""
_TOWER_LIBRARY_BYTES = {"onnxruntime": 66 * _MIB}
# Copies alive at once, measured: attention scores [heads, T, T], masks [T, T] in float32, one more
# where there are windows, and activations [T, H].
_TOWER_SCORE_COPIES = {"native": 1.5, "classic": 3.0}
_TOWER_MASK_COPIES = 2.5
_TOWER_ACTIVATION_COPIES = 12.0
_FLOAT = 4

# Bytes of a captured graph for each of its kernels, and how many of these a step has.
_KERNEL_BYTES = 3300
_LAYER_KERNELS = 14
# More where rows have rotary tables of their own: products, norms and rotations are not fused.
_APART_KERNELS = 6
_OTHER_KERNELS = 8
# For each product that adapters add to: two products and a sum.
_ADAPTER_KERNELS = 3


def estimate_engine(config: LLMEngineRunnerConfig) -> dict[str, int]:
    """Bytes by part that the engine of a decoder takes beside what is allocated for it.

    The scratch memory is that of the longest prefill chunk; `weights` are those that the engine
    does not bind.
    """
    simulated, tokens = config.backend == "simulated", sizes.longest_step(config)
    if config.device == "cuda":
        return {
            "context": _CONTEXT_BYTES,
            "library": _library_bytes(config),
            "weights": _cuda_weight_bytes(config),
            "engine_scratch": 0 if simulated else cuda_scratch_bytes(config, tokens),
            "prompt_graphs": prompt_graph_bytes(config),
        }
    tokens *= config.max_supported_batch_size
    scores = _score_bytes(config, tokens, _SCORE_COPIES[config.dialect])
    return {
        "process": _PROCESS_BYTES,
        "daemon_process": _DAEMON_PROCESS_BYTES,
        "weights": 0 if simulated else _resident_weights(config),
        "attention_scratch": 0 if simulated else scores,
        "activations": 0 if simulated else _activation_bytes(config, tokens, _ACTIVATION_COPIES),
    }


def estimate_draft(config: LLMEngineRunnerConfig, drafting: EagleDraftingConfig) -> dict[str, int]:
    """Bytes by part that a draft engine takes beside its base."""
    tokens = sizes.longest_draft_step(config, drafting)
    if config.device == "cuda":
        return {
            "draft_library": _DRAFT_LIBRARY_BYTES.get(config.backend, 0),
            "draft_weights": _cuda_weight_bytes(config),
            "draft_scratch": cuda_scratch_bytes(config, tokens),
        }
    tokens *= config.max_supported_batch_size
    scratch = _score_bytes(config, tokens, _DRAFT_SCORE_COPIES[config.dialect])
    scratch += _activation_bytes(config, tokens, _DRAFT_ACTIVATION_COPIES)
    return {"draft_weights": _resident_weights(config), "draft_scratch": scratch}


def estimate_host(config: LLMEngineRunnerConfig, weights: int) -> dict[str, int]:
    """Bytes by part of the host's memory that the process of a GPU's engine of `weights` takes."""
    images = _IMAGE_PINNED_BYTES if config.image_token_id else 0
    masks = _MASK_SLOTS * config.max_supported_batch_size * config.output_vocab_size // 8
    pinned = _PINNED_BYTES + masks + images
    return {"process": _HOST_BYTES, LOADING: weights, "pinned": pinned}


def estimate_tower(config: VisionConfig, patches: int) -> dict[str, int]:
    """Bytes by part of a tower whose largest call has so many patches, beside its buffers.

    On the CPU the tower has a process of its own, with another one that decodes.
    """
    if config.device == "cuda":
        parts = {"vision_library": _TOWER_LIBRARY_BYTES.get(config.backend, 0)}
    else:
        parts = {"vision_processes": _TOWER_PROCESS_BYTES}
    scratch = _tower_scratch_bytes(config, patches)
    return parts | {"vision_weights": _tower_weight_bytes(config), "vision_scratch": scratch}


def prompt_graph_bytes(config: LLMEngineRunnerConfig) -> int:
    """Bytes of the prefill steps that are captured."""
    layer = _LAYER_KERNELS + _ADAPTER_KERNELS * len(config.lora_targets)
    if config.use_context_dependent_rope:
        layer += _APART_KERNELS
    kernels = layer * config.num_decoder_layers + _OTHER_KERNELS
    return len(captured_prompts(config)) * kernels * _KERNEL_BYTES


def adapter_bytes(config: LLMEngineRunnerConfig, stored: Sequence[int]) -> int:
    """Bytes of adapters on the CPU, of as many bytes in files.

    Where an input joins projections there are zeros beside the diagonal, which no file has.
    """
    inputs = lora_inputs(config)
    joined = sum(one.numbers for one in inputs)
    ranks = ((one, one.rank // len(one.targets)) for one in inputs)
    apart = sum(rank * (len(one.targets) * one.inputs + sum(one.outputs)) for one, rank in ranks)
    return sum(stored) * joined // max(1, apart)


def cuda_scratch_bytes(config: LLMEngineRunnerConfig, tokens: int) -> int:
    """Bytes for a step of `tokens` tokens a row: activations, scores, mask and logits.

    A plan knows what its largest step takes, whatever is asked.
    """
    if config.plan is not None and config.plan.scratch_bytes is not None:
        return config.plan.scratch_bytes
    rows, capacity = config.max_supported_batch_size, config.max_kv_cache_capacity
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


def _score_bytes(config: LLMEngineRunnerConfig, tokens: int, copies: float) -> int:
    slots = config.max_kv_cache_capacity
    if config.dialect == "native":
        # Memory of a smaller bucket of the cache is too small for the next but one, and is not
        # given back; the many pieces of the classic dialect's attention find use for it.
        slots = sum(doubled_sizes(slots))
    scores = tokens * config.num_attention_heads * slots * ITEM_BYTES[config.dtype]
    mask = tokens * slots * _MASK_BYTES if config.takes_tree_mask else 0
    return int(scores * copies) + mask


def _activation_bytes(config: LLMEngineRunnerConfig, tokens: int, copies: float) -> int:
    return int(tokens * 2 * config.intermediate_size * 4 * copies)


def _library_bytes(config: LLMEngineRunnerConfig) -> int:
    known = _LIBRARY_BYTES.get(config.backend, 0)
    wide = ITEM_BYTES[config.dtype] == _FLOAT
    return _WIDE_LIBRARY_BYTES.get(config.backend, known) if wide else known


def _resident_weights(config: LLMEngineRunnerConfig) -> int:
    # float16 is widened when a session on the CPU opens.
    packed = sizes.weight_bytes(config, 4, 4 * _NUMBERS_PER_BLOCK)
    # ONNX Runtime 1.23, which the classic dialect is for, keeps the stored form beside it.
    stored = config.dialect == "classic" and config.weight_block_size > 0
    return packed + (sizes.projection_bytes(config) if stored else 0)


def _cuda_weight_bytes(config: LLMEngineRunnerConfig) -> int:
    """Weights of the matrix products in the engine's type, and the gains of the norms.

    A plan is its weights and its kernels: where it is there, its size is known.
    """
    plan = config.files.get(PLAN_FILE)
    if plan is not None:
        return plan.bytes
    if config.backend in ("kernels", "simulated"):
        return 0
    gains = config.num_decoder_layers * (2 * config.hidden_size + 2 * config.head_dim)
    elements = sizes.projection_elements(config) + gains + config.hidden_size
    return elements * ITEM_BYTES[config.dtype]


def _tower_weight_bytes(config: VisionConfig) -> int:
    record = config.files.get(PLAN_FILE if config.backend == "tensorrt" else DATA_FILE)
    stored = 0 if record is None else record.bytes
    # A session on the CPU widens 16 bits when it opens.
    return stored * (_FLOAT // ITEM_BYTES[config.dtype] if config.device == "cpu" else 1)


def _tower_scratch_bytes(config: VisionConfig, patches: int) -> int:
    if config.plan is not None and config.plan.scratch_bytes is not None:
        return config.plan.scratch_bytes
    item = _FLOAT if config.device == "cpu" else ITEM_BYTES[config.dtype]
    scores = config.num_heads * patches**2 * _TOWER_SCORE_COPIES[config.dialect]
    masks = patches**2 * (_TOWER_MASK_COPIES + bool(config.window_size))
    activations = patches * config.hidden_size * _TOWER_ACTIVATION_COPIES
    return int((scores + masks + activations) * item)
