"""The draft engine of an export: read and checked before anything is written."""

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import onnx_ir as ir

from hearth.runtime.config import DRAFT_ARCHITECTURE, LLMEngineRunnerConfig
from hearth.runtime.engine_folder import DRAFT_FOLDER, VOCABULARY_FILE, write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.decoder import Decoder
from hearth.runtime.export.dialect import BATCH, SELECTED, STEP, GraphDialect
from hearth.runtime.export.draft_config import (
    EMBEDDED_NORM,
    FUSED_NORM,
    FUSION,
    LAYER,
    DraftConfig,
    DraftOptions,
    check_draft_tensors,
    load_draft_config,
    open_draft,
    read_full_ids,
    resolve_drafting,
    resolve_taps,
    resolve_tree,
)
from hearth.runtime.export.engine_files import EngineParts, record, write_engine, write_rope
from hearth.runtime.export.external_weights import seal_own
from hearth.runtime.export.graph import GraphBuilder
from hearth.runtime.export.kernels_export import check_limits
from hearth.runtime.export.model_config import ModelConfig
from hearth.runtime.export.options import ExportOptions, resolve_block_size, resolve_capacity
from hearth.runtime.export.weights import Weights
from hearth.runtime.export.writer import Progress, TensorPieces, write_safetensors

# The graph of an EAGLE-3 draft (Li et al. 2025, "EAGLE-3: Scaling up Inference ...").


class DraftSizes(NamedTuple):
    """Sizes that only a draft has: numbers a token from the base, and its own vocabulary."""

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
        dialect: GraphDialect,
        weights: Weights,
        sizes: DraftSizes,
        *,
        trees: bool,
    ) -> None:
        super().__init__(graph, dialect, weights, trees=trees)
        self._sizes = sizes

    def build(self) -> None:
        """Append everything; weights are written to the data file on the way."""
        graph = self._graph
        inputs = self._declare_inputs()
        fused = self._fuse()
        cache = self._declare_cache(0)
        self._dialect.prepare(inputs, cache.k)
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
        graph.output(x, "hidden_states", self._dialect.dtype, shape)

    def _fuse(self) -> ir.Value:
        """The residual stream that enters the layer [B, S, H]."""
        graph, dtype, hidden = self._graph, self._dialect.dtype, self._model.hidden_size
        size = self._sizes.base_hidden_dim
        base = graph.input("hidden_states_input", dtype, (BATCH, STEP, size))
        own = graph.input("hidden_states_from_draft", dtype, (BATCH, STEP, hidden))
        return graph.op("Add", self._project(base, FUSION, [FUSION], size, hidden), own)

    def _rest(self, x: ir.Value, context: ir.Value) -> ir.Value:
        """The residual stream behind the layer, of x and context [B, M, .] of selected tokens."""
        addend = self._attention_output(0, context)
        x, normal = self._add_normalise(x, addend, f"{LAYER}.post_attention_layernorm")
        return self._graph.op("Add", x, self._mlp(0, normal))


class DraftExport:
    """A draft that fits its base model, and what it makes of both configurations."""

    def __init__(
        self,
        config: DraftConfig,
        checkpoint: Checkpoint,
        options: ExportOptions,
        draft: DraftOptions,
        taps: tuple[int, ...],
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._options = options
        self._draft = draft
        self._taps = taps
        self._base_hidden_dim = len(taps) * config.model.hidden_size
        check_draft_tensors(checkpoint, config, self._base_hidden_dim)
        self._full_ids = read_full_ids(checkpoint, config)

    @classmethod
    def open(cls, base: ModelConfig, options: ExportOptions) -> "DraftExport | None":
        """Read the draft that the options name, if they do; raises as `export_model`."""
        if options.draft is None:
            return None
        config = load_draft_config(options.draft.folder, base)
        taps = resolve_taps(options.draft.eagle_layers, config, base)
        return cls(config, open_draft(options.draft.folder), options, options.draft, taps)

    def adapt_base(self, config: LLMEngineRunnerConfig) -> LLMEngineRunnerConfig:
        """The base engine's configuration, with tree mask and hidden states.

        Raises `invalid_value` naming an option that this or the draft engine cannot have.
        """
        capacity = config.max_kv_cache_capacity
        resolve_capacity(self._options, capacity, self._config.model.window)
        base = msgspec.structs.replace(
            config,
            enable_eagle_spec_decode=True,
            eagle_layers=self._taps,
            output_hidden_dim=self._base_hidden_dim,
            max_verify_tree_size=resolve_tree(
                "max_verify_tree_size", self._draft.max_verify_tree_size, capacity
            ),
        )
        self.engine_config(base)
        return base

    def engine_config(self, base: LLMEngineRunnerConfig) -> LLMEngineRunnerConfig:
        """The draft engine's configuration, with the base's types and limits."""
        model, options = self._config.model, self._options
        kernels = base.backend == "kernels"
        drafting = () if options.plan is None else resolve_drafting(self._draft)
        tree = math.prod(drafting) if drafting else self._draft.max_draft_tree_size
        inputs = (
            self._base_hidden_dim, 2 * model.hidden_size, model.query_size, model.hidden_size,
            model.intermediate_size,
        )  # fmt: skip
        config = msgspec.structs.replace(
            base,
            architecture=DRAFT_ARCHITECTURE,
            weight_block_size=resolve_block_size(options, inputs),
            rope_config=model.rope,
            use_context_dependent_rope=model.rope_per_row,
            num_deepstack_features=0,
            max_supported_lora_rank=0,
            lora_targets=(),
            enable_eagle_spec_decode=False,
            eagle_layers=(),
            output_hidden_dim=0,
            max_verify_tree_size=0,
            num_decoder_layers=1,
            num_attention_layers=1,
            num_attention_heads=model.num_attention_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rotary_dim=model.rotary_dim,
            intermediate_size=model.intermediate_size,
            output_vocab_size=self._config.vocab_size,
            base_hidden_dim=self._base_hidden_dim,
            max_draft_tree_size=resolve_tree(
                "max_draft_tree_size", tree, base.max_kv_cache_capacity
            ),
            static_drafting=drafting,
            plan=None,
            embedding_dtype=None,
            external_weight_files=base.external_weight_files if kernels else (),
            files={},
        )
        if kernels:
            check_limits(config)
        return config

    def write(
        self, target: Path, base: LLMEngineRunnerConfig, progress: Progress | None
    ) -> LLMEngineRunnerConfig:
        """Write the draft's engine folder into the base's, whose configuration is `base`."""
        folder = target / DRAFT_FOLDER
        folder.mkdir()
        config = self.engine_config(base)
        build = partial(self._build, trees=config.takes_tree_mask)
        write_rope(folder, self._config.model, config.max_kv_cache_capacity)
        if self._full_ids is not None:
            pieces = TensorPieces(self._full_ids.dtype, self._full_ids.shape, [self._full_ids])
            write_safetensors(folder / VOCABULARY_FILE, {"full_ids": pieces})
        parts = EngineParts(self._config.model, self._checkpoint, build)
        config = write_engine(folder, config, parts, self._options.plan, progress)
        if config.external_weight_files:
            seal_own(folder, self._draft.folder.resolve().name)
        if config.dialect != base.dialect:
            raise HearthError(
                "model_unsupported",
                f"of the draft the builder makes a plan of the {config.dialect} dialect only: "
                f"export both with it",
                "dialect",
            )
        config = msgspec.structs.replace(config, files=record(folder, None))
        write_config(folder, config)
        return config

    def _build(
        self, graph: GraphBuilder, dialect: GraphDialect, weights: Weights, *, trees: bool
    ) -> None:
        sizes = DraftSizes(self._base_hidden_dim, self._config.vocab_size)
        DraftDecoder(graph, dialect, weights, sizes, trees=trees).build()
