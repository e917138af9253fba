"""From a Hugging Face folder to an engine folder."""

from pathlib import Path

import msgspec

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.engine_folder import write_config
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.draft_export import DraftExport
from hearth.runtime.export.engine_files import (
    EngineParts,
    engine_config,
    record,
    write_answer,
    write_embedding,
    write_engine,
    write_rope,
)
from hearth.runtime.export.external_weights import resolve_table_type, seal_own, table_bytes
from hearth.runtime.export.image_families import text_name
from hearth.runtime.export.json_file import read_config
from hearth.runtime.export.layout import check_tensors, settle_head
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.onnx_files import base_graph
from hearth.runtime.export.options import ExportOptions, TargetType, check_options
from hearth.runtime.export.progress import Progress
from hearth.runtime.export.tensorrt.plan import settle_options
from hearth.runtime.export.text_files import copy_text_files, read_sampling, read_template_tokens
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.files import fresh_folder
from hearth.runtime.tensors.lora import lora_targets


def export_model(
    source: Path, target: Path, options: ExportOptions, progress: Progress | None = None
) -> LLMEngineRunnerConfig:
    """Write an engine folder at `target`, which must not exist yet or be empty.

    With a draft its engine lies in a folder of its own inside, and so does the vision tower of a
    model that takes images. `progress` gets a stage, the bytes done and the bytes to do. Raises
    `model_unsupported`, `model_invalid`, `tokenizer_mismatch` or `invalid_value`, naming the file,
    tensor, field or option at fault; nothing is left behind then.
    """
    check_options(options)
    options = settle_options(options)
    model = load_model_config(source)
    checkpoint = Checkpoint(source, str if model.images is None else text_name)
    model = settle_head(checkpoint, model)
    check_tensors(checkpoint, model)
    config = engine_config(model, options)
    draft = DraftExport.open(model, options)
    if draft is not None:
        config = draft.adapt_base(config)
    config = msgspec.structs.replace(
        config,
        embedding_dtype=resolve_table_type(model, checkpoint, config),
        lora_targets=lora_targets(config, options.lora_targets),
        model_name=options.name or model_name(source),
        served_name=options.name,
    )
    with fresh_folder(target) as folder:
        copy_text_files(source, folder, model)
        tokens, sampling = read_template_tokens(source, model), read_sampling(source)
        config = msgspec.structs.replace(config, template_tokens=tokens, sampling=sampling)
        write_vision(source, folder, options, progress)
        write_rope(folder, model, config.max_kv_cache_capacity)
        if config.external_weight_files:
            table, beside = None, table_bytes(model, checkpoint, config)
        else:
            table = write_embedding(folder, model, checkpoint, config, progress)
            beside = 0 if table is None else -table.length
        parts = EngineParts(model, checkpoint, base_graph(model, checkpoint, config, table), beside)
        config = write_engine(folder, config, parts, options.plan, progress)
        drift = write_answer(folder, config, parts, progress)
        if config.external_weight_files:
            seal_own(folder, config.model_name)
        if draft is not None:
            draft.write(folder, config, progress)
        config = msgspec.structs.replace(config, drift=drift, files=record(folder, progress))
        write_config(folder, config)
    return config


def gpu_dtype(source: Path, options: ExportOptions) -> TargetType:
    """The type of 16 bits in which a GPU has a model where none is named.

    It is the checkpoint's own, and float16 for one in 32 bits, in plans, and where ONNX Runtime has
    int4, which was not tried in bfloat16, or trees, whose mask it cannot pad in that. Raises
    `model_invalid` for a model without tensors.
    """
    quantised = {options.quantization, options.head_weights} != {"none"}
    narrow = options.engine == "onnxruntime" and (quantised or options.verifies_trees)
    if options.engine == "tensorrt" or narrow:
        return "float16"
    read_config(source)  # It says what else than a model this is.
    stored = Checkpoint(source).stored_dtype
    return "bfloat16" if stored is not None and stored.name == "bfloat16" else "float16"


def model_name(source: Path) -> str:
    """Name of a Hugging Face folder; in the library's cache that of its repository."""
    folder = source.resolve()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name
