"""Weights beside an engine that has none: its own, and those of other models of its shape."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from hearth.runtime.config import WEIGHTS_FILE, DType, LLMEngineRunnerConfig
from hearth.runtime.engine_folder import ANSWER_FILE
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.graph import GraphBuilder, Location, Stored, Weights
from hearth.runtime.export.layout import EMBEDDING as EMBEDDING_SOURCE
from hearth.runtime.export.model_config import ModelConfig
from hearth.runtime.export.weights import row_pieces
from hearth.runtime.export.writer import DataFile
from hearth.runtime.memory.sizes import ITEM_BYTES, weights_head_bytes
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.weights.weights_file import (
    EMBEDDING,
    ModelFacts,
    StoredType,
    WeightEntry,
    WeightLayout,
    load_layout,
    write_head,
    write_layout,
)

_STORED: dict[ir.DataType, StoredType] = {
    ir.DataType.FLOAT: "F32",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.INT8: "I8",
    ir.DataType.UINT8: "U8",
}
_HEAD = "head"


def head_reads_table(model: ModelConfig, config: LLMEngineRunnerConfig) -> bool:
    """Return True if the embedding table gives the logits too, in the type of the graph."""
    return model.tied_head and config.head_weights == "none"


def resolve_table_type(
    model: ModelConfig, checkpoint: Checkpoint, config: LLMEngineRunnerConfig
) -> DType | None:
    """The type of an embedding table beside quantised weights: one of 16 bits.

    That of the source or the graph where one of them has 16 bits, else float16 if its range holds
    every number, else bfloat16. None where the table's type is not free: kernels have it in theirs,
    a head that reads it in the graph's, and where nothing is quantised it loses nothing.
    """
    free = config.weight_quantization != "none" and config.backend != "kernels"
    if not free or head_reads_table(model, config):
        return None
    stored = checkpoint.dtype(EMBEDDING_SOURCE)
    if stored.itemsize < ITEM_BYTES["float32"]:
        return "bfloat16" if stored.name == "bfloat16" else "float16"
    if config.dtype != "float32":
        return config.dtype
    largest, shape = float(np.finfo(np.float16).max), (model.vocab_size, model.hidden_size)
    pieces = row_pieces(checkpoint, EMBEDDING_SOURCE, shape, stored)
    return "float16" if all(np.abs(piece).max() <= largest for piece in pieces) else "bfloat16"


def table_type(
    model: ModelConfig, checkpoint: Checkpoint, config: LLMEngineRunnerConfig
) -> np.dtype[Any]:
    """The type in which the embedding table of an engine of a graph is stored."""
    if config.embedding_dtype is not None:
        return numpy_dtype(config.embedding_dtype)
    shared = head_reads_table(model, config)
    return numpy_dtype(config.dtype) if shared else checkpoint.dtype(EMBEDDING_SOURCE)


def write_table(
    graph: GraphBuilder, model: ModelConfig, checkpoint: Checkpoint, config: LLMEngineRunnerConfig
) -> Location | None:
    """Write the embedding table among a graph's weights; where it lies if the head reads it."""
    shared, shape = head_reads_table(model, config), (model.vocab_size, model.hidden_size)
    dtype = table_type(model, checkpoint, config)
    pieces = row_pieces(checkpoint, EMBEDDING_SOURCE, shape, dtype)
    table = graph.write(EMBEDDING, ir.DataType.from_numpy(dtype), shape, pieces)
    return table if shared else None


def table_bytes(model: ModelConfig, checkpoint: Checkpoint, config: LLMEngineRunnerConfig) -> int:
    """Bytes of a table beside the weights of all products."""
    if head_reads_table(model, config):
        return 0
    own = table_type(model, checkpoint, config)
    item = (numpy_dtype(config.dtype) if config.backend == "kernels" else own).itemsize
    return model.vocab_size * model.hidden_size * item


def write_data(
    path: Path,
    model: ModelConfig,
    config: LLMEngineRunnerConfig,
    opset: int,
    *,
    build: Callable[[GraphBuilder], None],
    written: Callable[[int], None],
) -> tuple[GraphBuilder, WeightLayout]:
    """Write a file of weights without its head; the graph that takes them, and its list."""
    begin = weights_head_bytes(model.num_layers)
    kind: Weights = "bound" if config.backend == "tensorrt" else "outside"
    with path.open("wb") as file:
        file.seek(begin)
        # Tensors of a safetensors file lie side by side.
        graph = GraphBuilder(DataFile(file, written, 1), WEIGHTS_FILE, opset, kind)
        build(graph)
    return graph, WeightLayout(
        begin=begin,
        bound=kind == "bound",
        head=EMBEDDING if head_reads_table(model, config) else _HEAD,
        tensors={name: _entry(stored) for name, stored in graph.written.items()},
        model=facts_of(model),
    )


def _entry(stored: Stored) -> WeightEntry:
    dtype, shape, (_, offset, nbytes) = stored
    if dtype == ir.DataType.INT4:  # safetensors has no such type
        return WeightEntry("U8", (nbytes,), offset, nbytes)
    return WeightEntry(_STORED[dtype], shape, offset, nbytes)


def facts_of(model: ModelConfig) -> ModelFacts:
    """Facts of the model that are in the graph itself."""
    fields = msgspec.structs.fields(ModelFacts)
    return ModelFacts(**{field.name: getattr(model, field.name) for field in fields})


def seal_own(folder: Path, source: str) -> None:
    """Finish the weights of a new engine folder, once its known answer is there; a draft has none.

    `source` is the name of their model.
    """
    layout, known = load_layout(folder), folder / ANSWER_FILE
    answer = known.read_bytes() if known.exists() else b""
    own = write_head(folder / WEIGHTS_FILE, layout, source, answer)
    write_layout(folder, msgspec.structs.replace(layout, own=own))
