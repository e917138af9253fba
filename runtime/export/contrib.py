"""The native dialect by ONNX Runtime's own operators, for its CUDA provider."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from runtime.errors import HearthError
from runtime.export.graph import GraphBuilder
from runtime.export.model_config import ModelConfig
from runtime.export.native import NativeSpelling
from runtime.export.options import ExportOptions, resolve_dialect
from runtime.export.spelling import BATCH, KeyValue, StepInputs

CONTRIB = "com.microsoft"
HEAD_MULTIPLE = 16
"""Elements of a head that GroupQueryAttention counts in."""


def resolve_operators(
    options: ExportOptions, model: ModelConfig, *, trees: bool = False
) -> Literal["standard", "contrib"]:
    """Which operators to write; `auto` means ONNX Runtime's own where they serve the model.

    `trees` says that the graph takes a tree mask. Raises `unsupported_option` when they are asked
    for and do not serve.
    """
    if options.operators == "standard" or not _runs_on_cuda(options):
        return "standard"
    reason = _why_not(options, model, trees=trees)
    if reason and options.operators == "contrib":
        raise HearthError("unsupported_option", f"no such operators: {reason}", "operators")
    return "standard" if reason else "contrib"


def resolve_chains(options: ExportOptions, model: ModelConfig) -> bool:
    """Whether an engine for speculation is causal: `auto` where GroupQueryAttention serves it.

    On CUDA that attention makes a step of one token, and one of a chain of a single row, nearly
    half as long as the attention that sees trees does.
    """
    if options.draft is None or options.draft.verify != "auto":
        return options.draft is not None and options.draft.verify == "chains"
    if options.operators == "standard" or not _runs_on_cuda(options):
        return False
    return _why_not(options, model, trees=False) is None


def _runs_on_cuda(options: ExportOptions) -> bool:
    """Whether ONNX Runtime's CUDA provider is to run the graph."""
    return options.engine == "onnxruntime" and options.device == "cuda"


def _why_not(options: ExportOptions, model: ModelConfig, *, trees: bool) -> str | None:
    if resolve_dialect(options) == "classic":
        return "the classic dialect has standard operators only"
    if trees:  # They have a spelling of their own.
        return None
    if options.dtype == "float32":
        return "attention on CUDA takes float16 or bfloat16, not float32"
    if model.head_dim % HEAD_MULTIPLE:
        return f"a head must be a multiple of {HEAD_MULTIPLE}"
    return None


class ContribSpelling(NativeSpelling):
    """One GroupQueryAttention a layer: norms, rotation, cache and attention.

    It takes several tokens of one row, or one token of several rows: the engine runs the rows
    of a prefill one by one (`OnnxCudaEngine`). Its kernel for decode steps turns all rows by one
    table, whatever positions it is given, so rows with tables of their own are turned before it.
    """

    # On a GPU the kernel that would split the product again costs more than a second product.
    joins_gate_and_up = False

    def __init__(self, graph: GraphBuilder, model: ModelConfig, dtype: np.dtype[Any]) -> None:
        super().__init__(graph, model, dtype)
        if model.rope_per_row:
            self.joins_qkv = False

    def prepare(self, inputs: StepInputs, cache: ir.Value) -> None:
        """The filled slots less one, the rotary tables in the graph's type, and the capacity."""
        graph = self.graph
        self.prepare_rotation(inputs)
        steps = graph.op("Shape", inputs.embeds, start=1, end=2)
        before = graph.op("Sub", steps, graph.ints(1))
        last = graph.op("Slice", self.every_slot, before, steps)
        self._last = self.cast(graph.op("Add", inputs.start, last), ir.DataType.INT32)
        # The kernels take the lengths from the device; this only bounds them, for all replays.
        slots = graph.op("Shape", cache, start=2, end=3)
        self._slots = self.cast(slots, ir.DataType.INT32)

    def prepare_rotation(self, inputs: StepInputs) -> None:
        """The rotary tables in the graph's type, or their rows where each row has its own."""
        self._positions = inputs.positions
        if self.model.rope_per_row:
            self._cos, self._sin = self.rotary_rows(inputs)
        else:
            tables = (inputs.cos, inputs.sin)
            self._cos, self._sin = (self.cast(table, self.dtype) for table in tables)

    def normalise(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        """One SimplifiedLayerNormalization, which ONNX Runtime keeps in the standard domain."""
        kind = "SimplifiedLayerNormalization"
        return self.graph.op(kind, x, weight, axis=-1, epsilon=self.model.rms_norm_eps)

    def add_normalise(
        self, x: ir.Value, addend: ir.Value, weight: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """One SkipSimplifiedLayerNormalization, whose last output is the sum."""
        kind = f"{CONTRIB}::SkipSimplifiedLayerNormalization"
        outputs = self.graph.ops(kind, 4, x, addend, weight, epsilon=self.model.rms_norm_eps)
        for unused in outputs[1:3]:
            unused.name = ""
        return outputs[3], outputs[0]

    def gated(self, gate: ir.Value, up: ir.Value) -> ir.Value:
        """QuickGelu with alpha 1 is SiLU."""
        return self.graph.op("Mul", self.graph.op(f"{CONTRIB}::QuickGelu", gate, alpha=1.0), up)

    def self_attention(
        self, layer: int, qkv: Sequence[ir.Value], norms: Sequence[ir.Value], cache: KeyValue
    ) -> ir.Value:
        """Queries, keys and values stay packed where they can; caches are written in place."""
        model = self.model
        heads: tuple[ir.Value | None, ...] = (*qkv, None, None)
        given: list[ir.Value | None] = [self._last, self._slots]
        attributes: dict[str, int | float] = {}
        if self.joins_qkv:
            given += [self._cos, self._sin, self._positions]
            attributes["do_rotary"] = 1
            if norms:
                given += [None, None, None, None, *norms]
                attributes["qk_norm_epsilon"] = model.rms_norm_eps
        else:
            heads = (*self.turned_heads(qkv, norms), qkv[2])
        context, k, v = self.graph.ops(
            f"{CONTRIB}::GroupQueryAttention",
            3,
            *(*heads, *cache, *given),
            num_heads=model.num_attention_heads,
            kv_num_heads=model.num_kv_heads,
            scale=model.head_dim**-0.5,
            **attributes,
        )
        shape = (BATCH, model.num_kv_heads, self.capacity, model.head_dim)
        for name, value in ((f"present_k_cache_{layer}", k), (f"present_v_cache_{layer}", v)):
            self.graph.output(value, name, self.dtype, shape)
        return context

    def turned_heads(
        self, qkv: Sequence[ir.Value], norms: Sequence[ir.Value]
    ) -> tuple[ir.Value, ir.Value]:
        """Queries and keys [B, S, size], normed if the model has norms, and turned."""
        heads = (self.model.num_attention_heads, self.model.num_kv_heads)
        q, k = qkv[:2]
        if norms:
            q, k = (self._normed(*one) for one in zip((q, k), norms, heads, strict=True))
        return self._turned(q, heads[0]), self._turned(k, heads[1])

    def _normed(self, x: ir.Value, weight: ir.Value, heads: int) -> ir.Value:
        graph = self.graph
        apart = graph.op("Reshape", x, graph.ints(0, 0, heads, self.model.head_dim))
        return graph.op("Reshape", self.normalise(apart, weight), graph.ints(0, 0, -1))

    def _turned(self, x: ir.Value, heads: int) -> ir.Value:
        if self.model.rope_per_row:
            return self.graph.op("RotaryEmbedding", x, self._cos, self._sin, num_heads=heads)
        tables = (self._positions, self._cos, self._sin)
        return self.graph.op(f"{CONTRIB}::RotaryEmbedding", x, *tables)
