"""The graph of a base engine, as its configuration says."""

from runtime.config import LLMEngineRunnerConfig
from runtime.export.checkpoint import Checkpoint
from runtime.export.decoder import Decoder
from runtime.export.external_weights import write_table
from runtime.export.graph import GraphBuilder, Location
from runtime.export.model_config import ModelConfig
from runtime.export.onnx_files import Build
from runtime.export.spelling import Spelling
from runtime.export.weights import Weights
from runtime.tensors.lora import lora_inputs


def base_graph(
    model: ModelConfig,
    checkpoint: Checkpoint,
    config: LLMEngineRunnerConfig,
    table: Location | None = None,
) -> Build:
    """What appends the model; `table` is where an embedding table lies that the head reads.

    External weights begin with it.
    """

    def build(graph: GraphBuilder, spelling: Spelling, weights: Weights) -> None:
        read = table
        if config.external_weight_files:
            read = write_table(graph, model, checkpoint, config)
        Decoder(
            graph,
            spelling,
            weights,
            read,
            config.eagle_layers,
            trees=config.takes_tree_mask,
            deepstack=config.num_deepstack_features,
            lora=lora_inputs(config),
        ).build()

    return build
