"""Runs the engine of kernels over random weights by the real device, step by step."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.config import DType, LLMEngineRunnerConfig, RopeConfig
from hearth.runtime.device.cuda.compiler import KernelCompiler, load_compiler_api
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.executor.engine import Binding
from hearth.runtime.executor.kernels.engine import KernelsEngine
from hearth.runtime.export.external_weights import facts_of
from hearth.runtime.export.kernels_export import kernel_tensors
from hearth.runtime.export.layout import expected_tensors
from hearth.runtime.export.model_config import ModelConfig
from hearth.runtime.export.reference_pass import decode, rope_tables
from hearth.runtime.files import cache_folder
from hearth.runtime.reference.token_trees import node_depths, pack_mask
from hearth.runtime.tensors.profiles import InferenceDims
from hearth.runtime.tensors.registry import TensorSpec, build_registry_for_llm
from hearth.runtime.tensors.tensor import Tensor, numpy_dtype
from hearth.runtime.weights.weights_file import (
    EMBEDDING,
    StoredType,
    WeightEntry,
    WeightLayout,
    write_layout,
)
from tests.runtime.engine_configs import small_config

Array = NDArray[Any]
_STORED: dict[str, StoredType] = {"float16": "F16", "bfloat16": "BF16", "uint8": "U8"}


class Family(NamedTuple):
    """A decoder of random weights."""

    hidden: int = 96
    inner: int = 200
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 0
    layers: int = 3
    vocabulary: int = 515
    tied: bool = False
    biased: bool = False
    qk_norm: bool = False
    eps: float = 1e-6

    @property
    def model(self) -> ModelConfig:
        """What the export knows of it."""
        return ModelConfig(
            architecture="qwen3",
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_layers=self.layers,
            num_attention_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim or self.head_dim,
            max_position_embeddings=1024,
            rms_norm_eps=self.eps,
            tied_head=self.tied,
            attention_bias=self.biased,
            qk_norm=self.qk_norm,
            rope=RopeConfig(),
            eos_token_ids=(0,),
            bos_token_id=None,
        )


LLAMA = Family()
QWEN2 = Family(biased=True, tied=True, head_dim=128, heads=6)
QWEN3 = Family(qk_norm=True, head_dim=128, tied=True, kv_heads=1)
SMALL_HEADS = Family(qk_norm=True, head_dim=16, heads=8, hidden=72)
PARTIAL = Family(head_dim=64, rotary_dim=32, heads=5, kv_heads=5)
LARGE_HEADS = Family(head_dim=256, heads=2, kv_heads=1)
# Inputs are whole blocks, and heads enough for each block of attention to have all positions.
WHOLE = Family(hidden=128, inner=320, heads=8, kv_heads=4, qk_norm=True)


def config_of(family: Family, dtype: DType, **changes: Any) -> LLMEngineRunnerConfig:
    """The configuration of an engine of kernels."""
    return structs.replace(
        small_config(),
        **{
            "backend": "kernels",
            "device": "cuda",
            "dtype": dtype,
            "kv_cache_dtype": dtype,
            "num_decoder_layers": family.layers,
            "num_attention_layers": family.layers,
            "num_attention_heads": family.heads,
            "num_kv_heads": family.kv_heads,
            "head_dim": family.head_dim,
            "rotary_dim": family.rotary_dim or family.head_dim,
            "hidden_size": family.hidden,
            "intermediate_size": family.inner,
            "vocab_size": family.vocabulary,
            "output_vocab_size": family.vocabulary,
            "max_supported_batch_size": 8,
            "max_supported_input_length": 1000,
            "max_kv_cache_capacity": 1024,
            "prefill_chunk": 256,
            **changes,
        },
    )


def weight_shapes(family: Family) -> dict[str, tuple[int, ...]]:
    """All tensors of a file of weights."""
    shapes = dict(expected_tensors(family.model))
    return {name: shapes[source] for name, source in kernel_tensors(family.model).items()}


def random_weights(family: Family, dtype: DType, seed: int = 0) -> dict[str, Array]:
    """Numbers of the engine's type, as wide as those of trained models."""
    random = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Array:
        values: Array = random.standard_normal(shape, np.float32)
        if name.endswith("norm"):
            values = 1 + np.float32(0.1) * values
        else:
            values *= np.float32((0.8 if len(shape) > 1 else 0.24) / shape[-1] ** 0.5)
        return values.astype(numpy_dtype(dtype))

    shapes = weight_shapes(family)
    return {name: draw(name, shape) for name, shape in shapes.items()}


class _Reference:
    """The weights as `hearth.runtime.export.reference_pass` reads them."""

    def __init__(self, model: ModelConfig, weights: Mapping[str, Array]) -> None:
        self._arrays = {source: weights[name] for name, source in kernel_tensors(model).items()}

    def vector(self, name: str) -> Array:
        return self._arrays[name].astype(np.float32)

    def project(self, x: Array, name: str) -> Array:
        product: Array = x @ self.vector(name).T
        return product


def reference_logits(family: Family, weights: Mapping[str, Array], ids: Sequence[int]) -> Array:
    """The logits [T, V] of every token, in float32."""
    model = family.model
    known: Any = _Reference(model, weights)
    embedded = weights[EMBEDDING][list(ids)].astype(np.float32)
    return decode(model, known, embedded, rope_tables(model.rope, model.rotary_dim, len(ids)))


class AmpereCompiler(KernelCompiler):
    """Compiles for the first GPUs that are served, as code that the driver finishes."""

    def _target(self) -> str:
        return "compute_80"


AMPERE = GpuFacts((8, 0), 132, 99 << 10, 100 << 10)
"""An RTX 3090's shared memory, and no dependent launches."""


class KernelDriver:
    """Steps over an engine of random weights; `filled` holds the slots in use of each row."""

    def __init__(
        self,
        device: CudaDevice,
        family: Family,
        dtype: DType,
        *,
        weights: Mapping[str, Array] | None = None,
        most_selected: int = 1,
        ampere: bool = False,
        clusters: bool = True,
        **changes: Any,
    ) -> None:
        self.device, self.family = device, family
        self.dependent = not ampere and device.properties.compute_capability >= (9, 0)
        self.config = config = config_of(family, dtype, **changes)
        self.weights = weights or random_weights(family, dtype)
        self.registry = build_registry_for_llm(config)
        entries = {
            name: WeightEntry(_STORED[one.dtype.name], one.shape, 0, 0)
            for name, one in self.weights.items()
        }
        layout = WeightLayout(
            begin=0,
            head="head" if "head" in self.weights else EMBEDDING,
            bound=True,
            tensors=entries,
            model=facts_of(family.model),
        )
        for name in layout.taken:
            array = self.weights[name]
            self.registry.add_own(TensorSpec(name, "input", array.dtype, array.shape))
        with tempfile.TemporaryDirectory() as folder:
            write_layout(Path(folder), layout)
            given: dict[str, Any] = {}
            if not clusters:
                given = {"facts": GpuFacts.of(device.context)._replace(largest_cluster=1)}
            if ampere:
                kernels = cache_folder() / "kernels"
                given = {
                    "facts": AMPERE,
                    "compiler": AmpereCompiler(load_compiler_api(), "sm_80", kernels),
                }
            self.engine = KernelsEngine.open(Path(folder), config, device, self.registry, **given)
        self.scratch = device.zeros(
            "scratch", (self.engine.required_context_memory,), np.dtype(np.uint8)
        )
        self.engine.set_context_memory(self.scratch)
        self.tensors = self._tensors(most_selected)
        self.filled = np.zeros(config.max_supported_batch_size, np.int64)
        self._known: dict[InferenceDims, tuple[Binding, ...]] = {}

    def _tensors(self, most_selected: int) -> dict[str, Tensor]:
        config, device = self.config, self.device
        rows = config.max_supported_batch_size
        chunk = InferenceDims.prefill(rows, config.prefill_chunk, config.max_kv_cache_capacity)
        largest = chunk._replace(select_len=most_selected)
        tensors = {
            spec.name: device.zeros(spec.name, spec.resolve(largest), spec.dtype)
            for spec in self.registry.specs
            if not spec.name.startswith("present_")
        }
        tensors |= {f"present_{name}": one for name, one in tensors.items() if "_cache_" in name}
        tensors |= {
            spec.name: device.constant(spec.name, self.weights[spec.name])
            for spec in self.registry.own_specs
            if spec.name in self.weights
        }
        # What is left are the inputs of an adapter.
        for spec in self.registry.own_specs:
            if spec.name not in tensors:
                shape = tuple(int(size) for size in spec.shape)
                tensors[spec.name] = device.zeros(spec.name, shape, spec.dtype)
        tables = rope_tables(RopeConfig(), config.rotary_dim, config.max_kv_cache_capacity)
        for name, table in zip(("rope_cos", "rope_sin"), tables, strict=True):
            tensors[name] = device.constant(name, table)
        return tensors

    def bindings(self, dims: InferenceDims) -> tuple[Binding, ...]:
        """Those of a step; the same tuple for the same dims."""
        found = self._known.get(dims)
        if found is None:
            found = tuple(self._binding(io.name, dims) for io in self.engine.io_tensors)
            self._known[dims] = found
        return found

    def _binding(self, name: str, dims: InferenceDims) -> Binding:
        spec, tensor = self.registry.get(name), self.tensors[name]
        shape = tensor.shape if spec is None else spec.resolve(dims)
        tensor.check(shape)
        return Binding(name, "input" if spec is None else spec.direction, tensor, shape)

    def feed(
        self,
        rows: Sequence[Sequence[int]],
        *,
        kv_len: int = 0,
        every: bool = False,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> InferenceDims:
        """Fill the inputs of a step; `every` token gets logits, or the last of each row.

        `parents` makes each row a tree, as `hearth.runtime.reference.token_trees` has them.
        """
        batch, width = len(rows), max(map(len, rows))
        ids, positions = np.zeros((batch, width), np.int64), np.zeros((batch, width), np.int64)
        tree = np.full((batch, width), -2, np.int32)
        for row, one in enumerate(rows):
            ids[row, : len(one)] = one
            tree[row, : len(one)] = np.arange(-1, len(one) - 1)
            if parents is not None:
                tree[row, : len(one)] = parents[row]
        mask = pack_mask(tree)
        depths = node_depths(mask)
        positions[...] = np.where(depths < 0, 0, self.filled[:batch, None] + depths)
        if self.config.takes_packed_mask:
            self.device.put(self.tensors["packed_mask"], mask)
        last = np.array([[len(one) - 1] for one in rows], np.int64)
        selected = np.arange(width)[None].repeat(batch, 0) if every else last
        put, tensors = self.device.put, self.tensors
        put(tensors["inputs_embeds"], self.weights[EMBEDDING][ids])
        put(tensors["kvcache_start_index"], self.filled[:batch])
        put(tensors["attention_pos_id"], positions)
        put(tensors["last_token_ids"], np.ascontiguousarray(selected, np.int64))
        slots = kv_len or self.config.max_kv_cache_capacity
        return InferenceDims.prefill(batch, width, slots)._replace(select_len=selected.shape[1])

    def step(
        self,
        rows: Sequence[Sequence[int]],
        *,
        kv_len: int = 0,
        every: bool = False,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Array:
        """Feed each row its next tokens; logits [B, N, V]."""
        dims = self.feed(rows, kv_len=kv_len, every=every, parents=parents)
        self.engine.run(self.bindings(dims), self.device.stream)
        self.filled[: len(rows)] += [len(one) for one in rows]
        return self.logits(dims)

    def logits(self, dims: InferenceDims) -> Array:
        """Those of the newest step [B, N, V]."""
        shape = (dims.batch, dims.select_len, self.config.output_vocab_size)
        whole = self.device.read(self.tensors["logits"]).reshape(-1)
        return whole[: np.prod(shape)].reshape(shape)

    def hidden(self, dims: InferenceDims) -> Array:
        """The hidden states that the newest step gave for a draft [B, S, W]."""
        shape = (dims.batch, dims.seq_len, self.config.output_hidden_dim)
        whole = self.device.read(self.tensors["hidden_states"]).reshape(-1)
        return whole[: np.prod(shape)].reshape(shape)

    def cache(self, name: str, rows: int, kv_len: int = 0) -> Array:
        """The caches of the first rows as a step of that many slots has them."""
        slots = kv_len or self.config.max_kv_cache_capacity
        shape = (rows, self.config.num_kv_heads, slots, self.config.head_dim)
        whole = self.device.read(self.tensors[name]).reshape(-1)
        return whole[: np.prod(shape)].reshape(shape)

    def reset(self, poison: int = 0) -> None:
        """Empty all rows; caches and scratch are filled with bytes of `poison`."""
        self.filled[:] = 0
        self.poison(poison)
        for name, tensor in self.tensors.items():
            if name.startswith(("k_cache", "v_cache", "logits")):
                self._fill(tensor, poison)

    def poison(self, byte: int) -> None:
        """Fill the scratch memory with such bytes; 0xff are numbers that are none."""
        self._fill(self.scratch, byte)

    def _fill(self, tensor: Tensor, byte: int) -> None:
        stream = self.device.stream.native
        driver = self.device.context.driver
        driver.call("cuMemsetD8Async", tensor.address, byte, tensor.nbytes, stream)

    def close(self) -> None:
        """Free what the engine holds; the device is not its own."""
        self.device.stream.synchronize()
        self.engine.close()
