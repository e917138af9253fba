"""The decoder that every served architecture shares, from embedded tokens to logits."""

from collections.abc import Sequence

import onnx_ir as ir

from hearth.runtime.export.dialect import BATCH, SELECTED, STEP, GraphDialect, KeyValue, StepInputs
from hearth.runtime.export.graph import GraphBuilder, Location
from hearth.runtime.export.weights import Projection, Weights
from hearth.runtime.tensors.lora import LoraInput

# Adapters in a graph (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models").


class LowRank:
    """Adds to projections what the adapter gives that is bound; declares the inputs for it."""

    def __init__(
        self, graph: GraphBuilder, dtype: ir.DataType, inputs: Sequence[LoraInput]
    ) -> None:
        self._graph = graph
        self._dtype = dtype
        self._inputs = {(one.layer, target): one for one in inputs for target in one.targets}

    def add(self, layer: int, target: str, x: ir.Value, product: ir.Value) -> ir.Value:
        """`product` [B, S, N] of x and a projection, or several from it on, and of their low rank.

        Without a pair for it that is `product` itself.
        """
        pair = self._inputs.get((layer, target))
        if pair is None:
            return product
        a = self._graph.input(pair.a, self._dtype, pair.shape_a)
        b = self._graph.input(pair.b, self._dtype, pair.shape_b)
        low = self._graph.op("MatMul", self._graph.op("MatMul", x, a), b)
        return self._graph.op("Add", product, low)


class Decoder:
    """Writes a decoder into a graph: inputs, layers, and logits of the selected tokens.

    `table` is where the embedding table lies if the head reads it, None for a head of its own.
    With `taps` the graph outputs, of every token, the residual stream that enters each of these
    layers; the number of layers stands for what leaves the last. `trees` adds a tree mask,
    `deepstack` as many inputs that are added behind the first layers, `lora` those of adapters.
    """

    layer_names = "model.layers.{}"
    norm_name = "model.norm"

    def __init__(
        self,
        graph: GraphBuilder,
        dialect: GraphDialect,
        weights: Weights,
        table: Location | None = None,
        taps: Sequence[int] = (),
        *,
        trees: bool = False,
        deepstack: int = 0,
        lora: Sequence[LoraInput] = (),
    ) -> None:
        self._graph = graph
        self._dialect = dialect
        self._model = dialect.model
        self._weights = weights
        self._table = table
        self._taps = taps
        self._trees = trees
        self._deepstack = deepstack
        self._low_rank = LowRank(graph, dialect.dtype, lora)
        self._entering: list[ir.Value] = []

    def build(self) -> None:
        """Append everything; weights are written to the data file on the way."""
        graph = self._graph
        inputs = self._declare_inputs()
        caches = [self._declare_cache(layer) for layer in range(self._model.num_layers)]
        self._dialect.prepare(inputs, caches[0].k)
        x: ir.Value = inputs.embeds
        addend: ir.Value | None = None
        for layer, cache in enumerate(caches):
            with graph.scope(f"layers.{layer}"):
                x, addend = self._layer(layer, (x, addend), cache)
                if layer < self._deepstack:
                    addend = graph.op("Add", addend, inputs.deepstack[layer])
        with graph.scope(f"layers.{len(caches) - 1}"):
            x = graph.op("Add", x, addend)
        self._entering.append(x)
        if self._taps:
            self._output_taps()
        logits = self._head(self._select(x, inputs.last), inputs.last, self._model.vocab_size)
        shape = (BATCH, SELECTED, self._model.vocab_size)
        graph.output(logits, "logits", ir.DataType.FLOAT, shape)

    def _output_taps(self) -> None:
        taps = [self._entering[layer] for layer in self._taps]
        hidden = self._graph.op("Concat", *taps, axis=-1)
        shape = (BATCH, STEP, len(taps) * self._model.hidden_size)
        self._graph.output(hidden, "hidden_states", self._dialect.dtype, shape)

    def _declare_inputs(self) -> StepInputs:
        graph, index, table = self._graph, self._dialect.index_type, ir.DataType.FLOAT
        rotary: tuple[int | str, ...] = (self._dialect.positions, self._model.rotary_dim // 2)
        if self._model.rope_per_row:
            rotary = (BATCH, *rotary)
        dtype, embeds = self._dialect.dtype, (BATCH, STEP, self._model.hidden_size)
        names = (f"deepstack_embeds_{feature}" for feature in range(self._deepstack))
        return StepInputs(
            embeds=graph.input("inputs_embeds", dtype, embeds),
            start=graph.input("kvcache_start_index", index, (BATCH,)),
            positions=graph.input("attention_pos_id", index, (BATCH, STEP)),
            last=graph.input("last_token_ids", index, (BATCH, SELECTED)),
            cos=graph.input("rope_cos", table, rotary),
            sin=graph.input("rope_sin", table, rotary),
            mask=graph.input("tree_mask", ir.DataType.BOOL, (BATCH, STEP, STEP))
            if self._trees
            else None,
            deepstack=tuple(graph.input(name, dtype, embeds) for name in names),
        )

    def _declare_cache(self, layer: int) -> KeyValue:
        dialect, graph = self._dialect, self._graph
        shape = (BATCH, self._model.num_kv_heads, dialect.capacity, self._model.head_dim)
        caches = [graph.input(f"{kind}_cache_{layer}", dialect.cache_dtype, shape) for kind in "kv"]
        if dialect.cache_dtype != dialect.dtype:
            caches = [dialect.cast(cache, dialect.dtype) for cache in caches]
        return KeyValue(*caches)

    def _layer(
        self, layer: int, x: tuple[ir.Value, ir.Value | None], cache: KeyValue
    ) -> tuple[ir.Value, ir.Value]:
        """The residual stream and what is still to be added to it, as `x` is given too."""
        prefix = self.layer_names.format(layer)
        stream, normal = self._add_normalise(*x, f"{prefix}.input_layernorm")
        self._entering.append(stream)
        context = self._context(layer, normal, self._model.hidden_size, cache)
        addend = self._attention_output(layer, context)
        stream, normal = self._add_normalise(stream, addend, f"{prefix}.post_attention_layernorm")
        return stream, self._mlp(layer, normal)

    def _add_normalise(
        self, x: ir.Value, addend: ir.Value | None, source: str
    ) -> tuple[ir.Value, ir.Value]:
        weight = self._weights.vector(self._graph, source, [f"{source}.weight"])
        if addend is None:
            return x, self._dialect.normalise(x, weight)
        return self._dialect.add_normalise(x, addend, weight)

    def _normalise(self, x: ir.Value, source: str) -> ir.Value:
        weight = self._weights.vector(self._graph, source, [f"{source}.weight"])
        return self._dialect.normalise(x, weight)

    def _project(
        self, x: ir.Value, name: str, sources: Sequence[str], size: int, width: int
    ) -> ir.Value:
        matrices = [f"{source}.weight" for source in sources]
        projection = Projection(self._graph.scoped(name), matrices, (size, width))
        return self._weights.project(self._graph, x, projection)

    def _context(self, layer: int, x: ir.Value, width: int, cache: KeyValue) -> ir.Value:
        """Attention [B, S, query size] of x [B, S, width]."""
        graph, model = self._graph, self._model
        prefix = f"{self.layer_names.format(layer)}.self_attn"
        sources = [f"{prefix}.{kind}_proj" for kind in "qkv"]
        shape = (width, model.query_size + 2 * model.kv_size)
        product = self._linear(x, "qkv", sources, shape, biased=model.attention_bias)
        qkv = self._low_rank.add(layer, "q", x, product)
        names = [f"{prefix}.{kind}_norm" for kind in "qk"] if model.qk_norm else []
        norms = [self._weights.vector(graph, name, [f"{name}.weight"]) for name in names]
        return self._dialect.self_attention(layer, qkv, norms, cache)

    def _linear(
        self,
        x: ir.Value,
        name: str,
        sources: Sequence[str],
        shape: tuple[int, int],
        *,
        biased: bool,
    ) -> ir.Value:
        """Projections side by side, with their biases if they have any."""
        graph, product = self._graph, self._project(x, name, sources, *shape)
        if not biased:
            return product
        biases = [f"{source}.bias" for source in sources]
        bias = self._weights.vector(graph, graph.scoped(f"{name}_bias"), biases)
        return graph.op("Add", product, bias)

    def _attention_output(self, layer: int, context: ir.Value) -> ir.Value:
        model = self._model
        sources = [f"{self.layer_names.format(layer)}.self_attn.o_proj"]
        shape = (model.query_size, model.hidden_size)
        output = self._linear(context, "output", sources, shape, biased=model.output_bias)
        return self._low_rank.add(layer, "o", context, output)

    def _mlp(self, layer: int, x: ir.Value) -> ir.Value:
        model, prefix = self._model, self.layer_names.format(layer)
        product = self._dialect.gated(*self._gate_and_up(layer, x, prefix))
        sources, shape = [f"{prefix}.mlp.down_proj"], (model.intermediate_size, model.hidden_size)
        output = self._linear(product, "down", sources, shape, biased=model.mlp_bias)
        return self._low_rank.add(layer, "down", product, output)

    def _gate_and_up(self, layer: int, x: ir.Value, prefix: str) -> Sequence[ir.Value]:
        graph, hidden, size = self._graph, self._model.hidden_size, self._model.intermediate_size
        biased = self._model.mlp_bias
        sources = [f"{prefix}.mlp.{kind}_proj" for kind in ("gate", "up")]
        both = self._linear(x, "gate_up", sources, (hidden, 2 * size), biased=biased)
        both = self._low_rank.add(layer, "gate", x, both)
        return graph.ops("Split", 2, both, graph.ints(size, size), axis=-1)

    def _select(self, x: ir.Value, last: ir.Value) -> ir.Value:
        if self._dialect.index_type != ir.DataType.INT64:
            last = self._dialect.cast(last, ir.DataType.INT64)
        rows = self._graph.op("Unsqueeze", last, self._graph.ints(-1))
        return self._graph.op("GatherND", x, rows, batch_dims=1)

    def _head(self, x: ir.Value, last: ir.Value, vocabulary: int) -> ir.Value:
        x = self._normalise(x, self.norm_name)
        size = (self._model.hidden_size, vocabulary)
        if self._table is not None:
            logits = self._tied_head(x, last, self._table)
        else:
            source = "model.embed_tokens" if self._model.tied_head else "lm_head"
            logits = self._project(x, "head", [source], *size)
        if self._dialect.dtype != ir.DataType.FLOAT:
            logits = self._dialect.cast(logits, ir.DataType.FLOAT)
        return logits

    def _tied_head(self, x: ir.Value, last: ir.Value, table: Location) -> ir.Value:
        # Gemm reads the table as it lies; a MatMul would need it a second time, transposed.
        graph, model = self._graph, self._model
        weight = graph.stored(
            "embedding", self._dialect.dtype, (model.vocab_size, model.hidden_size), table
        )
        rows = graph.op("Reshape", x, graph.ints(-1, model.hidden_size))
        logits = graph.op("Gemm", rows, weight, transB=1)
        shape = graph.op("Concat", graph.op("Shape", last), graph.ints(model.vocab_size), axis=0)
        return graph.op("Reshape", logits, shape)
