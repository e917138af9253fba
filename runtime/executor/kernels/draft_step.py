"""Launches of a draft's step that are neither products nor attention (`csrc/decoder/draft.cu`)."""

import ctypes
from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple

from hearth.runtime.config import DType, LLMEngineRunnerConfig
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.launch import Launch, addresses, integers
from hearth.runtime.device.cuda.programs import Kernels
from hearth.runtime.executor.engine import Binding, IOTensor
from hearth.runtime.executor.kernels.product_arguments import bound_weight
from hearth.runtime.executor.kernels.step import DecoderStep, StepMemory, StepShape, step_shape
from hearth.runtime.memory.sizes import ENTER, HEAD, OUTPUT, QKV, ScratchPart
from hearth.runtime.weights.weights_file import WeightLayout

_BLOCK = 256
PART = 4096
"""Logits that one block takes: how a sum over them is cut follows from the vocabulary alone."""


class FuseArguments(ctypes.Structure):
    """`Fuse` of csrc/decoder/draft.cu."""

    _fields_ = (
        *addresses("x own embeds embedded_gain fused_gain inputs"),
        *integers("size given"),
        ("eps", ctypes.c_float),
    )


class SelectArguments(ctypes.Structure):
    """`Select` of csrc/decoder/draft.cu."""

    _fields_ = (
        *addresses("x context last kept_x kept_context places"),
        *integers("seq_len select_len size width"),
    )


class ScoresArguments(ctypes.Structure):
    """`Scores` of csrc/decoder/draft.cu."""

    _fields_ = (*addresses("logits parts"), ("vocabulary", ctypes.c_int32))


class DraftConfig(NamedTuple):
    """`Config` of csrc/decoder/draft.cu."""

    bfloat: bool
    block: int = _BLOCK
    part: int = PART


class DraftPieces:
    """Elements are of the engine's `dtype`, x and logits float32; sizes in elements."""

    def __init__(self, programs: Kernels, dtype: DType) -> None:
        self._programs = programs
        self._config = DraftConfig(bfloat=dtype == "bfloat16")

    def fuse(  # noqa: PLR0917 (addresses and sizes, in the order of a step)
        self,
        x: int,
        own: int,
        embeds: int,
        gains: tuple[int, int],
        eps: float,
        inputs: int,
        size: int,
        tokens: int,
        *,
        given: bool,
    ) -> tuple[Launch, ...]:
        """Add own to x [T, H], which is zero unless it is `given`.

        inputs [T, 2H] are embeds and x, normed with the two `gains`.
        """
        arguments = FuseArguments(x, own, embeds, *gains, inputs, size, int(given), eps)
        return (self._launch("fuse", (tokens, 1, 1), arguments),)

    def select(
        self,
        x: tuple[int, int, int],
        context: tuple[int, int, int],
        last: int,
        places: int,
        shape: tuple[int, int, int],
    ) -> tuple[Launch, ...]:
        """The selected tokens of x and context, each (from, to, width); shape is (rows, S, M).

        `last` [rows, M] int64 says which they are; `places` of the same shape gets zeros.
        """
        rows, seq_len, select_len = shape
        arguments = SelectArguments(
            x[0], context[0], last, x[1], context[1], places, seq_len, select_len, x[2], context[2]
        )
        return (self._launch("select", (rows * select_len, 1, 1), arguments),)

    def log_softmax(
        self, logits: int, parts: int, rows: int, vocabulary: int
    ) -> tuple[Launch, ...]:
        """Log-probabilities in place of logits [rows, vocabulary]; `parts` as `parts_bytes`."""
        arguments = ScoresArguments(logits, parts, vocabulary)
        grid = (ceil(vocabulary / PART), rows, 1)
        return tuple(self._launch(name, grid, arguments) for name in ("measure", "normalise"))

    def _launch(self, name: str, grid: tuple[int, int, int], arguments: ctypes.Structure) -> Launch:
        function = self._programs.kernel("decoder/draft", name, self._config)
        return Launch(function, grid, _BLOCK, 0, arguments, name)


def parts_bytes(rows: int, vocabulary: int) -> int:
    """Scratch memory of `DraftPieces.log_softmax`."""
    return rows * ceil(vocabulary / PART) * 8


_FLOAT, _INDEX = 4, 8


class DraftStep(DecoderStep):
    """The launches of an EAGLE-3 draft's steps: `export.draft_export` has them as a graph.

    Launches behind attention run for the selected tokens only.
    """

    def __init__(
        self,
        config: LLMEngineRunnerConfig,
        layout: WeightLayout,
        io_tensors: Sequence[IOTensor],
        programs: Kernels,
        facts: GpuFacts,
    ) -> None:
        super().__init__(config, layout, io_tensors, programs, facts)
        self._pieces = DraftPieces(programs, config.dtype)
        self._most_kept = 0
        self.ranks_alone = False
        """True if only the order of the logits is read: they stay logits."""

    def provide(self, shapes: Iterable[StepShape]) -> StepMemory:
        """Provide for steps of at most these shapes; returns the memory that they need."""
        every = list(shapes)
        self._most_kept = max(shape.batch * shape.select_len for shape in every)
        return super().provide(every)

    def _parts(self) -> list[ScratchPart]:
        config, item, kept = self._config, self._item, self._most_kept
        hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
        scores = parts_bytes(kept, config.output_vocab_size)
        return [
            *super()._parts(),
            ScratchPart("inputs", self._most_tokens * 2 * hidden * item, ENTER, QKV),
            ScratchPart("kept_stream", kept * hidden * _FLOAT, OUTPUT, HEAD),
            ScratchPart("kept_attended", kept * queries * item, OUTPUT, OUTPUT),
            ScratchPart("places", kept * _INDEX, OUTPUT, HEAD),
            ScratchPart("scores", scores, HEAD, HEAD),
        ]

    def launches(self, bindings: Sequence[Binding]) -> list[Launch]:
        """Make the launches of a step with these addresses and shapes."""
        config, products, pieces = self._config, self._products, self._pieces
        at = {one.name: one.tensor.address for one in bindings}
        shapes = {one.name: one.shape for one in bindings}
        shape, given = step_shape(shapes), shapes["hidden_states_input"][1] > 0
        place = self._places(shape)
        products.use_scratch(place["normed"], shape.batch)
        self._attention.use_scratch(place["partials"])
        q, k, v, o, gate, up, down = self._matrices(self._layers[0], at)
        tokens, hidden, eps = shape.tokens, config.hidden_size, self._model.rms_norm_eps
        queries = config.num_attention_heads * config.head_dim
        x, attended, places = place["stream"], place["attended"], at["last_token_ids"]
        fc, wide = bound_weight(self._forms, "fc", at), config.base_hidden_dim
        entered = products.plain(at["hidden_states_input"], fc, wide, tokens, x) if given else ()
        made = [
            *entered,
            *pieces.fuse(
                x,
                at["hidden_states_from_draft"],
                at["inputs_embeds"],
                (at["layers.0.embedded_norm"], at["layers.0.fused_norm"]),
                eps,
                place["inputs"],
                hidden,
                tokens,
                given=given,
            ),
            *products.plain(place["inputs"], (q, k, v), 2 * hidden, tokens, place["projected"]),
            *self._attend(self._layers[0], shape, place, at),
        ]
        if shape.seq_len > 1:
            made += pieces.select(
                (x, place["kept_stream"], hidden),
                (attended, place["kept_attended"], queries),
                at["last_token_ids"],
                place["places"],
                (shape.batch, shape.seq_len, shape.select_len),
            )
            x, attended, places = place["kept_stream"], place["kept_attended"], place["places"]
        kept = shape.batch * shape.select_len
        scored: tuple[Launch, ...] = ()
        if not self.ranks_alone:
            scored = pieces.log_softmax(
                at["logits"], place["scores"], kept, config.output_vocab_size
            )
        return [
            *made,
            *products.residual(attended, o, queries, kept, x),
            *products.gated(
                x, at["layers.0.post_norm"], eps, gate, up, hidden, kept, place["activations"]
            ),
            *products.residual(
                place["activations"],
                down,
                config.intermediate_size,
                kept,
                x,
                tap=(at["hidden_states"], hidden),
            ),
            *products.head(
                x,
                at["norm"],
                eps,
                bound_weight(self._forms, self._head, at),
                hidden,
                kept,
                1,
                1,
                places,
                at["logits"],
            ),
            *scored,
        ]
