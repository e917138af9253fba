"""The graph of an EAGLE-3 draft (Li et al. 2025, "EAGLE-3: Scaling up Inference ...")."""

from typing import NamedTuple

import onnx_ir as ir

from runtime.export.decoder import Decoder
from runtime.export.draft_checkpoint import EMBEDDED_NORM, FUSED_NORM, FUSION, LAYER
from runtime.export.graph import GraphBuilder
from runtime.export.spelling import BATCH, SELECTED, STEP, Spelling
from runtime.export.weights import Weights


class DraftSizes(NamedTuple):
    """What a draft has that a decoder has not: numbers a token from the base, and its own ids."""

    base_hidden_dim: int
    vocabulary: int


class DraftDecoder(Decoder):
    """Writes a draft into a graph: inputs, one layer, and what the selected tokens give.

    The layer reads a token's embedding beside the base's hidden states or the draft's own; one of
    the two is zero. Only keys and values are needed of the tokens that are not selected.
    """

    layer_names = LAYER
    norm_name = "norm"

    def __init__(
        self,
        graph: GraphBuilder,
        spelling: Spelling,
        weights: Weights,
        sizes: DraftSizes,
        *,
        trees: bool,
    ) -> None:
        super().__init__(graph, spelling, weights, trees=trees)
        self._sizes = sizes

    def build(self) -> None:
        """Append everything; weights are written to the data file on the way."""
        graph = self._graph
        inputs = self._declare_inputs()
        fused = self._fuse()
        cache = self._declare_cache(0)
        self._spelling.prepare(inputs, cache.k)
        with graph.scope("layers.0"):
            both = graph.op(
                "Concat",
                self._normalise(inputs.embeds, EMBEDDED_NORM),
                self._normalise(fused, FUSED_NORM),
                axis=-1,
            )
            context = self._context(0, both, 2 * self._model.hidden_size, cache)
            x = self._rest(self._select(fused, inputs.last), self._select(context, inputs.last))
        logits = self._head(x, inputs.last, self._sizes.vocabulary)
        logits = graph.op("LogSoftmax", logits, axis=-1)
        shape = (BATCH, SELECTED, self._sizes.vocabulary)
        graph.output(logits, "logits", ir.DataType.FLOAT, shape)
        shape = (BATCH, SELECTED, self._model.hidden_size)
        graph.output(x, "hidden_states", self._spelling.dtype, shape)

    def _fuse(self) -> ir.Value:
        """The residual stream that enters the layer [B, S, H]."""
        graph, dtype, hidden = self._graph, self._spelling.dtype, self._model.hidden_size
        size = self._sizes.base_hidden_dim
        base = graph.input("hidden_states_input", dtype, (BATCH, STEP, size))
        own = graph.input("hidden_states_from_draft", dtype, (BATCH, STEP, hidden))
        return graph.op("Add", self._project(base, FUSION, [FUSION], size, hidden), own)

    def _rest(self, x: ir.Value, context: ir.Value) -> ir.Value:
        """The residual stream behind the layer, of x and context [B, M, .] of selected tokens."""
        addend = self._attention_output(0, context)
        x, normal = self._add_normalise(x, addend, f"{LAYER}.post_attention_layernorm")
        return self._graph.op("Add", x, self._mlp(0, normal))
