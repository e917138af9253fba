"""Bytes of what every engine holds, from its configuration alone, and of a step's scratch."""

from collections.abc import Sequence
from typing import NamedTuple

from hearth.runtime.config import DType, LLMEngineRunnerConfig
from hearth.runtime.options import EagleDraftingConfig
from hearth.runtime.tensors.lora import lora_inputs

ITEM_BYTES: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
_WEIGHT_BITS = {"int8": 8, "int4": 4}


def projection_elements(config: LLMEngineRunnerConfig) -> int:
    """Weights of all matrix products, the head included."""
    heads = 2 * config.num_attention_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * heads * config.head_dim
    if config.base_hidden_dim:  # A draft reads two vectors a token, and fuses the base's first.
        wide = config.num_attention_heads + 2 * config.num_kv_heads
        attention += config.hidden_size * (wide * config.head_dim + config.base_hidden_dim)
    mlp = 3 * config.hidden_size * config.intermediate_size
    head = config.hidden_size * config.output_vocab_size
    return config.num_decoder_layers * (attention + mlp) + head


def projection_bytes(config: LLMEngineRunnerConfig) -> int:
    """Bytes of these weights, with their scales, as the engine folder stores them."""
    item = ITEM_BYTES[config.dtype]
    return weight_bytes(config, item, item)


def weight_bytes(config: LLMEngineRunnerConfig, whole: int, per_block: int) -> int:
    """Bytes of these weights, if each that is not quantised takes `whole` of them.

    Others take their bits, and a block of them `per_block` bytes beside.
    """
    head = config.hidden_size * config.output_vocab_size
    body = projection_elements(config) - head
    size = 0
    for elements, kind in ((body, config.weight_quantization), (head, config.head_weights)):
        if kind == "none":
            size += elements * whole
        else:
            size += elements * _WEIGHT_BITS[kind] // 8
            size += elements // config.weight_block_size * per_block
    return size


def weights_head_bytes(layers: int) -> int:
    """Return the bytes before the data of a file of external weights: names and known answer."""
    return 4096 * (4 + layers)


def kv_cache_bytes(config: LLMEngineRunnerConfig, max_batch: int, capacity: int) -> int:
    """Keys and values of `max_batch` rows of `capacity` slots in all layers."""
    slot = 2 * config.num_attention_layers * config.num_kv_heads * config.head_dim
    return max_batch * capacity * slot * ITEM_BYTES[config.kv_cache_dtype]


def longest_step(config: LLMEngineRunnerConfig) -> int:
    """Tokens of a row in the longest step of a decoder."""
    return max(config.prefill_chunk, config.max_verify_tree_size)


def longest_draft_step(config: LLMEngineRunnerConfig, drafting: EagleDraftingConfig) -> int:
    """Tokens of a row in the longest step of a draft engine."""
    return max(config.prefill_chunk, drafting.proposal_size, drafting.most_accepted)


_ALIGNMENT = 256
_FLOAT = 4
# As many as any GPU has.
_MULTIPROCESSORS = 188
# Tokens up to which products multiply by an adapter's A themselves.
_FEW = 8
# Attention's tiles of queries, and the positions of its splits and spans.
_TILE, _SPLIT, _SPAN, _MOST_SPLITS = 16, 64, 256, 64
# Its blocks of nodes, the most of a step, and the slots of the caches that they serve.
_NODES, _MOST_NODES, _NODE_SLOTS = 8, 64, 2048
# The launches of a layer, between the step's first and its last one.
ENTER, QKV, ATTENTION, OUTPUT, GATE, DOWN, HEAD = range(7)


class ScratchPart(NamedTuple):
    """Bytes that hold something from one launch of a layer to another, both included."""

    name: str
    nbytes: int
    first: int
    last: int


class ScratchLayout(NamedTuple):
    """Offsets by name, and how many bytes that takes."""

    offsets: dict[str, int]
    nbytes: int


def step_parts(
    config: LLMEngineRunnerConfig, tokens: int, *, normed: int, partials: int
) -> list[ScratchPart]:
    """The parts of a decoder's steps of `tokens` tokens.

    `normed` are the bytes of normed inputs of a product, `partials` those of attention that was
    split over positions.
    """
    item = ITEM_BYTES[config.dtype]
    heads, queries = config.num_attention_heads, config.num_attention_heads * config.head_dim
    projected = (heads + 2 * config.num_kv_heads) * config.head_dim
    return [
        ScratchPart("stream", tokens * config.hidden_size * _FLOAT, ENTER, HEAD),
        ScratchPart("normed", normed, ENTER, HEAD),
        ScratchPart("projected", tokens * projected * _FLOAT, QKV, ATTENTION),
        ScratchPart("partials", partials, ATTENTION, ATTENTION),
        ScratchPart("attended", tokens * queries * item, ATTENTION, OUTPUT),
        ScratchPart("shrunk", tokens * _most_rank(config) * _FLOAT, QKV, DOWN),
        ScratchPart("mailbox", 2 * min(tokens, _FEW) * _most_rank(config) * _FLOAT, ENTER, DOWN),
        ScratchPart("activations", tokens * config.intermediate_size * item, GATE, DOWN),
    ]


def _most_rank(config: LLMEngineRunnerConfig) -> int:
    """Columns of the widest A of an adapter; 0 of an engine that takes none."""
    return max((one.rank for one in lora_inputs(config)), default=0)


def predicted_scratch(config: LLMEngineRunnerConfig, rows: int, seq_len: int, capacity: int) -> int:
    """Bytes of scratch memory, at the most, of an engine whose largest step has this size.

    Attention keeps the queries of that step. It keeps partial results of smaller ones, whose
    positions it spreads over the whole GPU: for each tile of queries of a row and a key head as
    many as there are splits, and for fewer tiles than multiprocessors as there are spans.
    """
    item, tokens = ITEM_BYTES[config.dtype], rows * seq_len
    queries = tokens * config.num_attention_heads * config.head_dim * item
    spans, splits = -(-capacity // _SPAN), min(_MOST_SPLITS, -(-capacity // _SPLIT))
    few = min(rows * config.num_kv_heads, 2 * _MULTIPROCESSORS) * max(splits, spans)
    tiles = max(few, _MULTIPROCESSORS * max(4, 2 * spans))
    spread = _TILE * tiles * (config.head_dim + 2) * _FLOAT
    spread += 2 * _TILE * _MULTIPROCESSORS * config.head_dim * item
    if capacity <= _NODE_SLOTS:
        spread = max(spread, _partials_of_nodes(config, rows, min(seq_len, _MOST_NODES), capacity))
    normed = tokens * config.hidden_size * item
    parts = step_parts(config, tokens, normed=normed, partials=max(queries, spread))
    if config.base_hidden_dim:  # A draft's heads read two vectors a token.
        parts.append(ScratchPart("inputs", 2 * normed, ENTER, QKV))
    return lay_out(parts).nbytes


def _partials_of_nodes(config: LLMEngineRunnerConfig, rows: int, nodes: int, capacity: int) -> int:
    """Bytes for steps whose nodes have spans of their own, eight nodes a block, and queries."""
    group, dim = config.num_attention_heads // config.num_kv_heads, config.head_dim
    blocks = min(rows * config.num_kv_heads * -(-nodes // _NODES), 2 * _MULTIPROCESSORS)
    sums = blocks * (capacity // _SPAN + 2) * _NODES * group * (dim + 2) * _FLOAT
    return sums + rows * nodes * config.num_attention_heads * dim * ITEM_BYTES[config.dtype]


def lay_out(parts: Sequence[ScratchPart]) -> ScratchLayout:
    """Places for all of them, where two that hold something at a time share nothing.

    The largest first, each as far to the front as it can be.
    """
    placed: list[tuple[int, int, ScratchPart]] = []
    for part in sorted(parts, key=lambda one: -one.nbytes):
        size = -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        offset = 0
        for begin, end, other in sorted(placed):
            apart = other.last < part.first or part.last < other.first
            if not apart and begin < offset + size and offset < end:
                offset = end
        placed.append((offset, offset + size, part))
    offsets = {part.name: offset for offset, _, part in placed}
    return ScratchLayout(offsets, max((end for _, end, _ in placed), default=0))
