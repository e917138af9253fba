"""Weights beside an engine that has none: its own, and those of other models of its shape."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import onnx_ir as ir

from runtime.config import WEIGHTS_FILE, LLMEngineRunnerConfig
from runtime.engine_folder import ANSWER_FILE
from runtime.export.checkpoint import Checkpoint
from runtime.export.graph import GraphBuilder, Location, Stored, Weights
from runtime.export.layout import EMBEDDING as EMBEDDING_SOURCE
from runtime.export.model_config import ModelConfig
from runtime.export.weights import row_pieces
from runtime.export.writer import DataFile
from runtime.memory.sizes import weights_head_bytes
from runtime.tensors.dtypes import numpy_dtype
from runtime.weights.layout import (
    EMBEDDING,
    ModelFacts,
    StoredType,
    WeightEntry,
    WeightLayout,
    load_layout,
    write_layout,
)
from runtime.weights.weights_file import write_head

_STORED: dict[ir.DataType, StoredType] = {
    ir.DataType.FLOAT: "F32",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.INT8: "I8",
    ir.DataType.UINT8: "U8",
}
_HEAD = "head"


def head_reads_table(model: ModelConfig, config: LLMEngineRunnerConfig) -> bool:
    """Whether the embedding table gives the logits too, in the type of the graph."""
    return model.tied_head and config.head_weights == "none"


def write_table(
    graph: GraphBuilder, model: ModelConfig, checkpoint: Checkpoint, config: LLMEngineRunnerConfig
) -> Location | None:
    """Write the embedding table among a graph's weights; where it lies if the head reads it."""
    shared, shape = head_reads_table(model, config), (model.vocab_size, model.hidden_size)
    dtype = numpy_dtype(config.dtype) if shared else checkpoint.dtype(EMBEDDING_SOURCE)
    pieces = row_pieces(checkpoint, EMBEDDING_SOURCE, shape, dtype)
    table = graph.write(EMBEDDING, ir.DataType.from_numpy(dtype), shape, pieces)
    return table if shared else None


def table_bytes(model: ModelConfig, checkpoint: Checkpoint, config: LLMEngineRunnerConfig) -> int:
    """Bytes of a table that stands beside the weights of all products."""
    if head_reads_table(model, config):
        return 0
    dtype = checkpoint.dtype(EMBEDDING_SOURCE)
    item = (numpy_dtype(config.dtype) if config.backend == "kernels" else dtype).itemsize
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
    """What of the model is in the graph itself."""
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
