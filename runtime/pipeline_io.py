from typing import Any

import numpy as np

from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device
from runtime.device.dtypes import numpy_dtype
from runtime.shared_resources import SharedResources
from runtime.tensors.registry import index_dtype
from runtime.tensors.tensor import Tensor
from runtime.tensors.tensor_map import TensorMap


class PipelineIO:
    """All buffers of a step, allocated once at their largest size; addresses never change.

    A step uses the first elements of each buffer as a dense array of its own shape.
    """

    inputs_embeds: Tensor
    """[max batch, prefill chunk, H], the engine's type."""
    output_logits: Tensor
    """[max batch, 1, V], float32."""
    next_tokens: Tensor
    """[max batch] int32: the newest token of each row, from the sampler to the next step."""
    select_token_indices: Tensor
    """[max batch, 1]: which token of each row gets logits; bound as `last_token_ids`."""
    position_ids: Tensor
    """[max batch, prefill chunk]; bound as `attention_pos_id`."""
    host_context_lengths: Tensor
    """[max batch]: tokens of each row in the step, without padding; on the host, not bound."""
    new_keys: tuple[Tensor, ...]
    """Classic dialect: [max batch, kv_heads, prefill chunk, head_dim] per attention layer."""
    new_values: tuple[Tensor, ...]
    """As `new_keys`."""

    @classmethod
    def create_for_llm(cls, config: LLMEngineRunnerConfig, device: Device) -> "PipelineIO":
        """Allocate the buffers of a single decoder engine."""
        io = cls()
        batch, chunk = config.max_supported_batch_size, config.prefill_chunk
        allocate_basic_io(
            io,
            device,
            max_batch=batch,
            max_seq=chunk,
            hidden_size=config.hidden_size,
            vocab_size=config.output_vocab_size,
            dtype=numpy_dtype(config.dtype),
            index=index_dtype(config),
        )
        layers = range(config.num_attention_layers if config.dialect == "classic" else 0)
        rows = (batch, config.num_kv_heads, chunk, config.head_dim)
        cache = numpy_dtype(config.kv_cache_dtype)
        io.new_keys = tuple(device.zeros(f"present_k_cache_{i}", rows, cache) for i in layers)
        io.new_values = tuple(device.zeros(f"present_v_cache_{i}", rows, cache) for i in layers)
        return io


def allocate_basic_io(
    io: PipelineIO,
    device: Device,
    *,
    max_batch: int,
    max_seq: int,
    hidden_size: int,
    vocab_size: int,
    dtype: np.dtype[Any],
    index: np.dtype[Any],
) -> None:
    """Allocate what every decoder needs; `index` is the type of index bindings."""
    io.inputs_embeds = device.zeros("inputs_embeds", (max_batch, max_seq, hidden_size), dtype)
    io.output_logits = device.zeros("logits", (max_batch, 1, vocab_size), np.dtype(np.float32))
    io.next_tokens = device.zeros("next_tokens", (max_batch,), np.dtype(np.int32))
    io.select_token_indices = device.zeros("last_token_ids", (max_batch, 1), index)
    io.position_ids = device.zeros("attention_pos_id", (max_batch, max_seq), index)
    io.host_context_lengths = Tensor.zeros("context_lengths", (max_batch,), index)


def build_tensor_map(
    tensors: TensorMap, io: PipelineIO, resources: SharedResources, cache_index: int = 0
) -> None:
    """Name every buffer as the engine binds it; `cache_index` 0 means the base engine's caches.

    In the native dialect an output cache is the input cache itself.
    """
    caches = resources.cache_managers[cache_index]
    for tensor in (
        io.inputs_embeds,
        io.output_logits,
        io.select_token_indices,
        io.position_ids,
        caches.lengths,
        *resources.rope,
    ):
        tensors.set(tensor.name, tensor)
    for layer in range(len(caches.kv.keys)):
        keys, values = caches.attention_layer(layer)
        new_keys = io.new_keys[layer] if io.new_keys else keys
        new_values = io.new_values[layer] if io.new_values else values
        tensors.set(f"k_cache_{layer}", keys)
        tensors.set(f"v_cache_{layer}", values)
        tensors.set(f"present_k_cache_{layer}", new_keys)
        tensors.set(f"present_v_cache_{layer}", new_values)
