"""Configurations and bindings of steps of kernels, without weights or a GPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import structs

from hearth.runtime.config import LLMEngineRunnerConfig, RopeConfig
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.executor.engine import Binding, IOTensor
from hearth.runtime.executor.kernels.engine import fixed_shape
from hearth.runtime.tensors.profiles import InferenceDims
from hearth.runtime.tensors.registry import TensorRegistry, TensorSpec, build_registry_for_llm
from hearth.runtime.tensors.tensor import Tensor
from hearth.runtime.weights.weights_file import EMBEDDING, ModelFacts, WeightEntry, WeightLayout
from tests.runtime.engine_configs import small_config

FACTS = GpuFacts((9, 0), 132, 227 << 10, 228 << 10, 8)


def kernels_config(**changes: Any) -> LLMEngineRunnerConfig:
    """Two layers of two heads of 16 over one, float16."""
    config = structs.replace(
        small_config(),
        backend="kernels",
        device="cuda",
        dtype="float16",
        kv_cache_dtype="float16",
        head_dim=16,
        rotary_dim=16,
        hidden_size=32,
        intermediate_size=64,
    )
    return structs.replace(config, **changes)


def layout_of(
    config: LLMEngineRunnerConfig, *, tied: bool = True, biased: bool = False
) -> WeightLayout:
    """The list of an engine's weights, which lie nowhere."""
    queries, keys = (
        heads * config.head_dim for heads in (config.num_attention_heads, config.num_kv_heads)
    )
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_decoder_layers):
        name = f"layers.{layer}"
        shapes |= {
            f"{name}.{one}": (size, hidden)
            for one, size in zip("qkv", (queries, keys, keys), strict=True)
        }
        shapes |= {f"{name}.o": (hidden, queries), f"{name}.down": (hidden, inner)}
        shapes |= {f"{name}.{one}": (inner, hidden) for one in ("gate", "up")}
        shapes |= {f"{name}.{one}_norm": (hidden,) for one in ("input", "post")}
        shapes |= {f"{name}.{one}_norm": (config.head_dim,) for one in "qk"}
        if biased:
            sizes = zip("qkv", (queries, keys, keys), strict=True)
            shapes |= {f"{name}.{one}_bias": (size,) for one, size in sizes}
    shapes["norm"] = (hidden,)
    if not tied:
        shapes["head"] = (config.vocab_size, hidden)
    return WeightLayout(
        begin=0,
        head=EMBEDDING if tied else "head",
        bound=True,
        tensors={name: WeightEntry("F16", shape, 0, 0) for name, shape in shapes.items()},
        model=ModelFacts(
            architecture="qwen3",
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            intermediate_size=inner,
            num_layers=config.num_decoder_layers,
            num_attention_heads=config.num_attention_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            rms_norm_eps=1e-6,
            tied_head=tied,
            attention_bias=biased,
            qk_norm=True,
            rope=RopeConfig(),
        ),
    )


def registry_of(config: LLMEngineRunnerConfig, layout: WeightLayout) -> TensorRegistry:
    """The bindings of the engine, its weights among them."""
    registry = build_registry_for_llm(config)
    for name, entry in layout.taken.items():
        registry.add_own(TensorSpec(name, "input", np.dtype(np.float16), entry.shape))
    return registry


def bindings_of(
    io_tensors: tuple[IOTensor, ...], registry: TensorRegistry, dims: InferenceDims
) -> tuple[Binding, ...]:
    """A step at addresses of its own: the n-th binding lies at n << 20."""
    return tuple(_bindings(io_tensors, registry, dims))


def _bindings(
    io_tensors: tuple[IOTensor, ...], registry: TensorRegistry, dims: InferenceDims
) -> Iterator[Binding]:
    for number, io in enumerate(io_tensors, 1):
        spec = registry.get(io.name)
        shape = fixed_shape(io) if spec is None else spec.resolve(dims)
        tensor = Tensor.on_device(io.name, number << 20, shape, io.dtype, None)
        yield Binding(io.name, io.direction, tensor, shape)
