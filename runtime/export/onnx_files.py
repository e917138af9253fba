"""The two ONNX files of an engine folder: the graph, and beside it the weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx_ir as ir

from hearth.runtime.config import WEIGHTS_FILE, LLMEngineRunnerConfig
from hearth.runtime.engine_folder import DATA_FILE, MODEL_FILE
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.decoder import Decoder
from hearth.runtime.export.dialect import (
    CLASSIC_OPSET,
    NATIVE_OPSET,
    QUANTIZED_OPSET,
    ClassicDialect,
    GraphDialect,
    NativeDialect,
    PrimitiveDialect,
)
from hearth.runtime.export.external_weights import write_data, write_table
from hearth.runtime.export.graph import GraphBuilder, Location
from hearth.runtime.export.model_config import ModelConfig
from hearth.runtime.export.weights import Weights
from hearth.runtime.export.writer import DataFile
from hearth.runtime.tensors.lora import lora_inputs
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.weights.weights_file import WeightLayout, write_layout

Build = Callable[[GraphBuilder, GraphDialect, Weights], None]
"""Appends a model to a graph."""
IR_VERSION = 8
IR_VERSION_NATIVE = 10  # also what opset 21 and later ask for


def write_onnx(
    folder: Path,
    model: ModelConfig,
    config: LLMEngineRunnerConfig,
    weights: Weights,
    *,
    build: Build,
    written: Callable[[int], None],
) -> None:
    """Write `model.onnx` and `model.onnx.data` in the dialect of the configuration.

    External weights take the place of the latter. `build` appends the model; `written` gets the
    bytes of every piece of the data file.
    """
    opset, append = _opset(config), partial(_append, model, config, weights, build)
    if config.external_weight_files:
        path = folder / WEIGHTS_FILE
        graph, layout = write_data(path, model, config, opset, build=append, written=written)
        write_layout(folder, layout)
    else:
        with (folder / DATA_FILE).open("wb") as file:
            graph = GraphBuilder(DataFile(file, written), DATA_FILE, opset)
            append(graph)
    ir_version = IR_VERSION if opset == CLASSIC_OPSET else IR_VERSION_NATIVE
    graph.save(folder / MODEL_FILE, ir_version)


def write_weights(
    path: Path,
    model: ModelConfig,
    config: LLMEngineRunnerConfig,
    weights: Weights,
    *,
    build: Build,
    written: Callable[[int], None],
) -> WeightLayout:
    """Write the weights of another model for such an engine, without their head; their list."""
    append = partial(_append, model, config, weights, build)
    return write_data(path, model, config, _opset(config), build=append, written=written)[1]


def _append(
    model: ModelConfig,
    config: LLMEngineRunnerConfig,
    weights: Weights,
    build: Build,
    graph: GraphBuilder,
) -> None:
    chosen = _dialect(config)(graph, model, weights.dtype)
    if config.backend == "tensorrt":
        chosen.capacity = chosen.positions = config.max_kv_cache_capacity
        chosen.cache_dtype = ir.DataType.from_numpy(numpy_dtype(config.kv_cache_dtype))
    build(graph, chosen, weights)


def _opset(config: LLMEngineRunnerConfig) -> int:
    if config.dialect == "native":
        return NATIVE_OPSET
    return CLASSIC_OPSET if config.weight_block_size == 0 else QUANTIZED_OPSET


def _dialect(config: LLMEngineRunnerConfig) -> type[GraphDialect]:
    if config.dialect == "classic":
        return PrimitiveDialect if config.backend == "tensorrt" else ClassicDialect
    return NativeDialect


def base_graph(
    model: ModelConfig,
    checkpoint: Checkpoint,
    config: LLMEngineRunnerConfig,
    table: Location | None = None,
) -> Build:
    """Return a function that appends the model; the head reads the embedding `table` if given.

    External weights begin with it.
    """

    def build(graph: GraphBuilder, dialect: GraphDialect, weights: Weights) -> None:
        read = table
        if config.external_weight_files:
            read = write_table(graph, model, checkpoint, config)
        Decoder(
            graph,
            dialect,
            weights,
            read,
            config.eagle_layers,
            trees=config.takes_tree_mask,
            deepstack=config.num_deepstack_features,
            lora=lora_inputs(config),
        ).build()

    return build
