"""The files of an engine folder."""

import math
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from hearth.runtime.config import (
    DRAFT_ARCHITECTURE,
    WEIGHTS_FILE,
    Drift,
    FileRecord,
    LLMEngineRunnerConfig,
)
from hearth.runtime.engine_folder import ANSWER_FILE, EMBEDDING_FILE, ROPE_FILE, record_files
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.external_weights import head_reads_table, table_type
from hearth.runtime.export.graph import Location
from hearth.runtime.export.kernels_export import check_limits, refuse_biases, write_kernels
from hearth.runtime.export.known_answer import (
    ToleranceProbe,
    known_answer,
    measure_drift,
    run_probe,
    unquantised,
)
from hearth.runtime.export.layout import EMBEDDING, expected_tensors
from hearth.runtime.export.model_config import ModelConfig
from hearth.runtime.export.onnx_files import Build, write_onnx
from hearth.runtime.export.options import (
    ExportOptions,
    PlanOptions,
    resolve_block_size,
    resolve_capacity,
    resolve_chunk,
    resolve_decode_batches,
    resolve_dialect,
)
from hearth.runtime.export.reference_pass import RoundedWeights, rope_tables
from hearth.runtime.export.tensorrt.plan import build_or_fall_back
from hearth.runtime.export.weights import Weights, row_pieces
from hearth.runtime.export.writer import Progress, ProgressCounter, TensorPieces, write_safetensors
from hearth.runtime.memory.sizes import projection_bytes, projection_elements
from hearth.runtime.packages import VERSION

_SMALL = 500_000_000
"""Parameters below which four bits are too few for the head (docs/lab/weights-and-answers.md)."""


def resolve_head(
    options: ExportOptions, model: ModelConfig
) -> Literal["body", "none", "int8", "int4"]:
    """The quantisation of the head; `auto` spares small models of int4 one of four bits."""
    if options.head_quantization != "auto":
        return options.head_quantization
    parameters = sum(math.prod(shape) for _, shape in expected_tensors(model))
    small = options.quantization == "int4" and parameters < _SMALL
    return "int8" if small and not options.on_foreign_gpu else "body"


def engine_config(model: ModelConfig, options: ExportOptions) -> LLMEngineRunnerConfig:
    """Everything that `config.json` states, but the file records.

    The longest prompt is one token shorter than the capacity, so that a prompt of exactly the
    limit still gets one token in answer. Raises `model_unsupported` for sizes that kernels do not
    serve, where they are to, and `invalid_value` for an option that the model cannot have.
    """
    capacity = resolve_capacity(options, model.max_position_embeddings, model.window)
    kernels = options.engine == "kernels"
    dialect = "native" if kernels else resolve_dialect(options)
    plan = options.plan
    inputs = [model.hidden_size]  # those of the head
    if options.quantization != "none":
        inputs += [model.query_size, model.intermediate_size]
    config = LLMEngineRunnerConfig(
        hearth_version=VERSION,
        backend=options.engine,
        device=options.device if plan is None else "cuda",
        chains_only=options.draft is not None and options.draft.verify == "chains",
        static_decode_batches=()
        if plan is None
        else resolve_decode_batches(plan, options.max_batch),
        dialect=dialect,
        architecture=model.architecture if model.images is None else model.images.name,
        dtype=options.dtype,
        kv_cache_dtype=options.dtype
        if plan is None or plan.kv_cache_dtype == "auto"
        else plan.kv_cache_dtype,
        weight_quantization=options.quantization,
        head_quantization=resolve_head(options, model),
        weight_block_size=resolve_block_size(options, inputs),
        rope_config=model.rope,
        use_context_dependent_rope=model.rope_per_row,
        use_trt_native_ops=dialect == "native",
        num_decoder_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rotary_dim=model.rotary_dim,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        max_supported_batch_size=options.max_batch,
        max_supported_input_length=capacity - 1,
        max_kv_cache_capacity=capacity,
        prefill_chunk=resolve_chunk(options, capacity),
        vocab_size=model.vocab_size,
        output_vocab_size=model.vocab_size,
        max_supported_lora_rank=options.max_lora_rank,
        num_attention_layers=model.num_layers,
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id,
        num_deepstack_features=model.num_deepstack_features,
        image_token_id=model.image_token_id,
        external_weight_files=(WEIGHTS_FILE,) if kernels or options.external_weights else (),
    )
    if kernels:
        refuse_biases(model)
        check_limits(config)
    return config


def write_rope(folder: Path, model: ModelConfig, positions: int) -> None:
    """Write the rotary tables of the first `positions`."""
    tables = rope_tables(model.rope, model.rotary_dim, positions)
    named = zip(("cos", "sin"), tables, strict=True)
    write_safetensors(
        folder / ROPE_FILE,
        {name: TensorPieces(table.dtype, table.shape, [table]) for name, table in named},
    )


def write_embedding(
    folder: Path,
    model: ModelConfig,
    checkpoint: Checkpoint,
    config: LLMEngineRunnerConfig,
    progress: Progress | None,
) -> Location | None:
    """Write the table; where it lies, if the head of the graph is to read it.

    The table keeps the type of the source, which loses nothing, unless weights are quantised; only
    a head that reads it needs the type of the graph.
    """
    shared = head_reads_table(model, config)
    dtype = table_type(model, checkpoint, config)
    shape = (model.vocab_size, model.hidden_size)
    size = math.prod(shape) * dtype.itemsize
    counter = ProgressCounter(progress, "embedding", size)
    pieces = counter.over(row_pieces(checkpoint, EMBEDDING, shape, dtype))
    tensors = {"embedding": TensorPieces(dtype, shape, pieces)}
    offsets = write_safetensors(folder / EMBEDDING_FILE, tensors)
    return Location(EMBEDDING_FILE, offsets["embedding"], size) if shared else None


class EngineParts(NamedTuple):
    """Parts of an engine; `build` appends its graph, which an engine of kernels has not.

    `beside` are bytes of weights beside those of all products, negative for those elsewhere.
    """

    model: ModelConfig
    checkpoint: Checkpoint
    build: Build
    beside: int = 0


def write_engine(
    folder: Path,
    config: LLMEngineRunnerConfig,
    parts: EngineParts,
    plan: PlanOptions | None,
    progress: Progress | None,
) -> LLMEngineRunnerConfig:
    """Write what runs, and the configuration that it has then.

    It is a graph, a plan made of one if one is wanted, or the weights of kernels.
    """
    stage = "draft weights" if config.architecture == DRAFT_ARCHITECTURE else "weights"
    counter = ProgressCounter(progress, stage, projection_bytes(config) + parts.beside)

    if config.backend == "kernels":
        write_kernels(folder, parts.model, parts.checkpoint, config, counter.add)
        counter.finish()
        return config

    def write_graph(config: LLMEngineRunnerConfig) -> None:
        weights = Weights(parts.checkpoint, config)
        write_onnx(folder, parts.model, config, weights, build=parts.build, written=counter.add)
        counter.finish()

    write_graph(config)
    if plan is None:
        return config
    return build_or_fall_back(folder, config, plan, write_graph, progress)


def write_answer(
    folder: Path, config: LLMEngineRunnerConfig, parts: EngineParts, progress: Progress | None
) -> Drift | None:
    """Compute and write what the engine has to answer; how far that is from the model's answer.

    None where nothing is quantised.
    """
    quantised = {config.weight_quantization, config.head_weights} != {"none"}
    counter = ProgressCounter(progress, "answer", projection_elements(config) * 4 * (1 + quantised))
    reference = run_probe(
        parts.model, ToleranceProbe(parts.checkpoint, config, counter.add), config
    )
    answer = known_answer(reference, config)
    (folder / ANSWER_FILE).write_bytes(msgspec.json.encode(answer))
    drift = None
    if quantised:
        whole = RoundedWeights(parts.checkpoint, unquantised(config), counter.add)
        drift = measure_drift(parts.model, whole, reference)
    counter.finish()
    return drift


def record(folder: Path, progress: Progress | None) -> dict[str, FileRecord]:
    """Size and digest of all files in the folder."""
    sizes = (path.stat().st_size for path in folder.iterdir() if path.is_file())
    counter = ProgressCounter(progress, "digests", sum(sizes))
    records = record_files(folder)
    counter.finish()
    return records
