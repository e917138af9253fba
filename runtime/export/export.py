"""From a Hugging Face folder to an engine folder."""

import math
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from runtime.config import FileRecord, LLMEngineRunnerConfig
from runtime.device.dtypes import numpy_dtype
from runtime.engine_folder import EMBEDDING_FILE, ROPE_FILE, record_files, write_config
from runtime.errors import HearthError
from runtime.export.checkpoint import Checkpoint
from runtime.export.engine_config import engine_config
from runtime.export.graph import Location
from runtime.export.layout import EMBEDDING, check_tensors
from runtime.export.model_config import ModelConfig, load_model_config
from runtime.export.onnx_files import write_onnx
from runtime.export.options import ExportOptions, check_options
from runtime.export.progress import Meter, Progress
from runtime.export.tensorrt.plan import build_or_fall_back, settle_dialect
from runtime.export.text_files import copy_text_files
from runtime.export.weights import Weights, row_pieces
from runtime.export.writer import TensorPieces, write_safetensors
from runtime.rope import rope_tables
from runtime.sizes import projection_bytes


def export_model(
    source: Path, target: Path, options: ExportOptions, progress: Progress | None = None
) -> LLMEngineRunnerConfig:
    """Write an engine folder at `target`, which must not exist yet or be empty.

    `progress` hears a stage, the bytes done and the bytes to do. Raises `model_unsupported`,
    `model_invalid`, `tokenizer_mismatch` or `invalid_value`, naming the file, tensor, field or
    option at fault; nothing is left behind then.
    """
    check_options(options)
    options = settle_dialect(options)
    model = load_model_config(source)
    checkpoint = Checkpoint(source)
    check_tensors(checkpoint, model)
    config = engine_config(model, options)
    with _fresh_folder(target) as folder:
        copy_text_files(source, folder, model)
        _write_rope(folder, model, config.max_kv_cache_capacity)
        table = _write_embedding(folder, model, checkpoint, options, progress)
        total = projection_bytes(config) - (0 if table is None else table.length)
        meter = Meter(progress, "weights", total)

        def write_graph(config: LLMEngineRunnerConfig) -> None:
            weights = Weights(checkpoint, config)
            write_onnx(folder, model, config, weights, table=table, written=meter.add)
            meter.finish()

        write_graph(config)
        if options.plan is not None:
            config = build_or_fall_back(folder, config, options.plan, write_graph, progress)
        config = msgspec.structs.replace(config, files=_record(folder, progress))
        write_config(folder, config)
    return config


@contextmanager
def _fresh_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target that becomes the target, or vanishes when the block fails."""
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise HearthError(
            "invalid_value", f"{target} exists already: remove it or name another", "target"
        )
    folder = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
        yield folder
        folder.rename(target)
    except OSError as error:
        raise HearthError(
            "invalid_value", f"{target} cannot be written: make room or name another", "target"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_rope(folder: Path, model: ModelConfig, positions: int) -> None:
    tables = rope_tables(model.rope, model.rotary_dim, positions)
    named = zip(("cos", "sin"), tables, strict=True)
    write_safetensors(
        folder / ROPE_FILE,
        {name: TensorPieces(table.dtype, table.shape, [table]) for name, table in named},
    )


def _write_embedding(
    folder: Path,
    model: ModelConfig,
    checkpoint: Checkpoint,
    options: ExportOptions,
    progress: Progress | None,
) -> Location | None:
    """Write the table; where it lies, if the head of the graph is to read it.

    The table keeps the type of the source, which loses nothing; only a head that reads it needs
    the type of the graph.
    """
    shared = model.tied_head and options.quantization == "none"
    dtype = numpy_dtype(options.dtype) if shared else checkpoint.dtype(EMBEDDING)
    shape = (model.vocab_size, model.hidden_size)
    size = math.prod(shape) * dtype.itemsize
    meter = Meter(progress, "embedding", size)
    pieces = meter.over(row_pieces(checkpoint, EMBEDDING, shape, dtype))
    tensors = {"embedding": TensorPieces(dtype, shape, pieces)}
    offsets = write_safetensors(folder / EMBEDDING_FILE, tensors)
    return Location(EMBEDDING_FILE, offsets["embedding"], size) if shared else None


def _record(folder: Path, progress: Progress | None) -> dict[str, FileRecord]:
    meter = Meter(progress, "digests", sum(path.stat().st_size for path in folder.iterdir()))
    records = record_files(folder)
    meter.finish()
    return records
