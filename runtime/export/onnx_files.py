"""The two ONNX files of an engine folder: the graph, and beside it the weights."""

from collections.abc import Callable
from pathlib import Path

from runtime.config import LLMEngineRunnerConfig
from runtime.engine_folder import DATA_FILE, MODEL_FILE
from runtime.export import classic, contrib, native
from runtime.export.decoder import Decoder
from runtime.export.graph import GraphBuilder, Location
from runtime.export.model_config import ModelConfig
from runtime.export.spelling import Spelling
from runtime.export.tensorrt.spelling import PrimitiveSpelling
from runtime.export.weights import Weights
from runtime.export.writer import DataFile

_IR_VERSION = 8
_IR_VERSION_INT4 = 10  # also what opset 21 and later ask for


def write_onnx(
    folder: Path,
    model: ModelConfig,
    config: LLMEngineRunnerConfig,
    weights: Weights,
    *,
    table: Location | None,
    written: Callable[[int], None],
) -> None:
    """Write `model.onnx` and `model.onnx.data` in the dialect of the configuration.

    `table` is where a tied head lies, None for a head of its own; `written` hears the bytes of
    every piece of the data file.
    """
    spelling: type[Spelling] = native.NativeSpelling
    if config.operators == "contrib":
        spelling = contrib.ContribSpelling
    opset = native.OPSET
    if config.dialect == "classic":
        quantized = config.weight_quantization != "none"
        plain = config.backend == "tensorrt"
        spelling = PrimitiveSpelling if plain else classic.ClassicSpelling
        opset = classic.QUANTIZED_OPSET if quantized else classic.OPSET
    with (folder / DATA_FILE).open("wb") as file:
        graph = GraphBuilder(DataFile(file, written), DATA_FILE, opset)
        chosen = spelling(graph, model, weights.dtype)
        if config.backend == "tensorrt":
            chosen.capacity = chosen.positions = config.max_kv_cache_capacity
        elif config.device == "cuda":
            chosen.longest_range = config.max_kv_cache_capacity
        Decoder(graph, chosen, weights, table).build()
    ir_version = _IR_VERSION if opset == classic.OPSET else _IR_VERSION_INT4
    graph.save(folder / MODEL_FILE, ir_version)
