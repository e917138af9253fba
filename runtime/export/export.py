"""From a Hugging Face folder to an engine folder, or to the weights of one that there is."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hearth.runtime.config import LLMEngineRunnerConfig, load_config
from hearth.runtime.engine_folder import LAYOUT_FILE, TOKENIZER_FILE, write_config
from hearth.runtime.errors import HearthError
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
from hearth.runtime.export.external_weights import (
    facts_of,
    resolve_table_type,
    seal_own,
    table_bytes,
)
from hearth.runtime.export.image_families import text_name
from hearth.runtime.export.json_file import read_config, read_json
from hearth.runtime.export.kernels_export import kernel_parts, write_kernel_weights
from hearth.runtime.export.known_answer import ToleranceProbe, known_answer, run_probe
from hearth.runtime.export.layout import check_tensors, settle_head
from hearth.runtime.export.model_config import ModelConfig, load_model_config
from hearth.runtime.export.onnx_files import base_graph, write_weights
from hearth.runtime.export.options import ExportOptions, TargetType, check_options
from hearth.runtime.export.tensorrt.plan import settle_options
from hearth.runtime.export.text_files import (
    check_tokenizer,
    copy_text_files,
    read_sampling,
    read_template_tokens,
)
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.export.weights import Weights
from hearth.runtime.export.writer import Progress, ProgressCounter
from hearth.runtime.files import fresh_file, fresh_folder
from hearth.runtime.memory.sizes import projection_bytes, projection_elements
from hearth.runtime.tensors.lora import lora_targets
from hearth.runtime.weights.weights_file import WeightsFile, load_layout, open_weights, write_head


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


def export_weights(
    source: Path, engine: Path, target: Path, progress: Progress | None = None
) -> WeightsFile:
    """Write the weights of a Hugging Face folder for an engine folder into the file `target`.

    The engine keeps its tokenizer, chat template, draft and vision tower. Raises the
    errors of `export_model`; `model_unsupported` and `tokenizer_mismatch` name the difference
    between model and engine. Nothing is left behind then.
    """
    config = load_config(engine)
    if not config.external_weight_files:
        raise HearthError(
            "unsupported_option",
            f"{engine} holds its weights itself: export it with --external-weights",
            "engine",
        )
    layout, model = load_layout(engine), load_model_config(source)
    checkpoint = Checkpoint(source, str if model.images is None else text_name)
    model = settle_head(checkpoint, model)
    _check_model(model, config, facts=(msgspec.structs.asdict(layout.model)))
    _check_tokenizer(source, engine, model)
    check_tensors(checkpoint, model)
    weights = ProgressCounter(
        progress, "weights", projection_bytes(config) + table_bytes(model, checkpoint, config)
    )
    answering = ProgressCounter(progress, "answer", projection_elements(config) * 4)
    with fresh_file(target) as path:
        if config.backend == "kernels":
            parts = partial(kernel_parts, checkpoint=checkpoint, config=config)
            written = write_kernel_weights(path, model, parts, config, weights.add)
        else:
            build = base_graph(model, checkpoint, config)
            made = Weights(checkpoint, config)
            written = write_weights(path, model, config, made, build=build, written=weights.add)
        weights.finish()
        if (written.begin, written.tensors) != (layout.begin, layout.tensors):
            raise HearthError(
                "engine_incompatible",
                "this version of Hearth lays weights out otherwise than the engine does: export "
                "the engine again",
                LAYOUT_FILE,
            )
        reference = run_probe(model, ToleranceProbe(checkpoint, config, answering.add), config)
        answer = known_answer(reference, config)
        write_head(path, layout, model_name(source), msgspec.json.encode(answer))
        answering.finish()
        open_weights(path, layout)
    return open_weights(target, layout)


def _check_model(model: ModelConfig, config: LLMEngineRunnerConfig, facts: dict[str, Any]) -> None:
    """Refuse a model for which the graph, or what the runtime knows of it, would be another."""
    given = msgspec.structs.asdict(facts_of(model))
    given |= {
        "image_token_id": model.image_token_id,
        "num_deepstack_features": model.num_deepstack_features,
    }
    wanted = facts | {name: getattr(config, name) for name in given if name not in facts}
    for name, value in given.items():
        if value != wanted[name]:
            raise HearthError(
                "model_unsupported",
                f"{name} of the model is {value}, that of the engine {wanted[name]}: export the "
                "model as an engine of its own",
                name,
            )
    if model.window is not None and model.window < config.max_kv_cache_capacity:
        raise HearthError(
            "model_unsupported",
            f"the model's layers see {model.window} tokens, rows of the engine have "
            f"{config.max_kv_cache_capacity}: export it as an engine of its own",
            "sliding_window",
        )
    others = set(model.eos_token_ids) - set(config.eos_token_ids)
    if others:
        raise HearthError(
            "model_unsupported",
            f"the model ends with the token {min(others)}, at which the engine does not stop: "
            "export it as an engine of its own",
            "eos_token_id",
        )


def _check_tokenizer(source: Path, engine: Path, model: ModelConfig) -> None:
    """The engine's tokenizer has to mean by each id what the model's does."""
    theirs, ours = source / TOKENIZER_FILE, engine / TOKENIZER_FILE
    check_tokenizer(theirs, model)
    if theirs.read_bytes() == ours.read_bytes():
        return
    one, other = (_meaning(read_json(path)) for path in (theirs, ours))
    if one != other:
        raise HearthError(
            "tokenizer_mismatch",
            f"the model's {TOKENIZER_FILE} is not the engine's: export it as an engine of its own",
            TOKENIZER_FILE,
        )


def _meaning(tokenizer: dict[str, Any]) -> tuple[Any, ...]:
    added = tokenizer.get("added_tokens") or []
    tokens = sorted((one.get("id"), one.get("content")) for one in added)
    parts = (tokenizer.get(name) for name in ("normalizer", "pre_tokenizer", "model"))
    return (tokens, *parts)
