"""The files of an engine folder: their names, their digests and the check before they are used."""

import errno
import hashlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from hearth.runtime.config import (
    CONFIG_FILES,
    DRAFT_ARCHITECTURE,
    FileRecord,
    LLMEngineRunnerConfig,
    config_file,
    load_config,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.files import has_digest, record_digest
from hearth.runtime.vision_config import (
    VISION_CONFIG_FILE,
    VISION_FOLDER,
    VisionConfig,
    load_vision_config,
)

MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
PLAN_FILE = "model.plan"
EMBEDDING_FILE = "embedding.safetensors"
ROPE_FILE = "rope.safetensors"
ANSWER_FILE = "answer.json"
"""Known answer of the engine (`hearth.runtime.known_answer`); older folders have none."""
LAYOUT_FILE = "weights.json"
"""Tensors that an engine takes from a file of external weights."""
VOCABULARY_FILE = "vocabulary.safetensors"
"""A draft's own vocabulary: the token of each of its ids."""
DRAFT_FOLDER = "draft"
"""The engine folder of a draft, inside that of its base."""
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
# A folder without a chat template serves raw prompts alone; all else must be there.
REQUIRED_FILES = (MODEL_FILE, DATA_FILE, EMBEDDING_FILE, ROPE_FILE, TOKENIZER_FILE)
_REQUIRED_BY = {
    "kernels": (ROPE_FILE, TOKENIZER_FILE),
    "onnxruntime": REQUIRED_FILES,
    "tensorrt": (PLAN_FILE, *REQUIRED_FILES[2:]),
    "simulated": (),
}
_NOT_OF_A_DRAFT = (EMBEDDING_FILE, TOKENIZER_FILE)


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Size and SHA-256 of every file of the folder but its configuration, by name."""
    paths = sorted(
        path for path in folder.iterdir() if path.is_file() and path.name not in CONFIG_FILES
    )
    return {path.name: FileRecord(path.stat().st_size, record_digest(path)) for path in paths}


def engine_identity(folder: Path) -> str:
    """A digest of what others than an engine's executor know of it: its shape, its text, its tower.

    Engines of one identity differ in their decoder's weights alone. Raises `engine_*`.
    """
    config, tower = load_config(folder), load_vision_config(folder)
    text = {name: config.files.get(name) for name in (TOKENIZER_FILE, TEMPLATE_FILE)}
    of_weights: dict[str, Any] = {
        "model_name": "",
        "embedding_dtype": None,
        "drift": None,
        "files": {},
    }
    shape = msgspec.structs.replace(config, hearth_version="", plan=None, **of_weights)
    return hashlib.sha256(msgspec.json.encode([shape, text, tower])).hexdigest()


def check_identity(folder: Path, identity: str) -> None:
    """Raise `engine_incompatible` where another engine lies there than the one of `identity`."""
    if identity and engine_identity(folder) != identity:
        raise HearthError(
            "engine_incompatible",
            f"{folder} holds another engine than the daemon was started with, in more than its "
            "weights: restart the daemon to serve it",
            "engine",
        )


def write_config(folder: Path, config: LLMEngineRunnerConfig | VisionConfig) -> None:
    """Write the configuration, one field a line, into the file of its own folder."""
    text = msgspec.json.format(msgspec.json.encode(config), indent=1)
    name = VISION_CONFIG_FILE if isinstance(config, VisionConfig) else config_file(config)
    (folder / name).write_bytes(text + b"\n")


def verify_folder(
    folder: Path,
    config: LLMEngineRunnerConfig | VisionConfig,
    *,
    digests: bool,
    read: Callable[[int], None] | None = None,
    skip: Collection[str] = (),
) -> None:
    """Compare the files with the records in the configuration, but for those to `skip`.

    Checks presence and size, and with `digests` every byte; `read` gets the bytes of each piece
    that has been read. Raises `engine_corrupt` naming the
    file that is missing, not recorded, of another size or changed, and `engine_missing` for one
    that may not be read.
    """
    for name in _required(config):
        if name not in config.files:
            raise _corrupt(name, f"is not recorded in {_file_of(config)}")
    for name, record in config.files.items():
        path = folder / name
        if path.name != name:
            raise _corrupt(name, "lies outside the engine folder")
        if name in skip:
            continue
        try:
            _compare(path, record, digests=digests, read=read)
        except OSError as error:
            raise HearthError(
                "engine_missing", f"{path} cannot be read ({error.strerror})", name
            ) from error


def _compare(
    path: Path, record: FileRecord, *, digests: bool, read: Callable[[int], None] | None
) -> None:
    if not path.is_file():
        raise _corrupt(path.name, "is missing")
    size = path.stat().st_size
    if size != record.bytes:
        raise _corrupt(path.name, f"has {size} bytes instead of {record.bytes}")
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if digests and not has_digest(path, record.sha256, read):
        raise _corrupt(path.name, "was changed after the export")


def _file_of(config: LLMEngineRunnerConfig | VisionConfig) -> str:
    if isinstance(config, VisionConfig):
        return f"{VISION_FOLDER}/{VISION_CONFIG_FILE}"
    return config_file(config)


def _required(config: LLMEngineRunnerConfig | VisionConfig) -> Iterator[str]:
    if isinstance(config, VisionConfig):
        yield from (PLAN_FILE,) if config.backend == "tensorrt" else (MODEL_FILE, DATA_FILE)
        yield ANSWER_FILE
        return
    is_draft = config.architecture == DRAFT_ARCHITECTURE
    outside = (DATA_FILE, EMBEDDING_FILE) if config.external_weight_files else ()
    for name in _REQUIRED_BY[config.backend]:
        if name not in outside and not (is_draft and name in _NOT_OF_A_DRAFT):
            yield name
    if outside:
        yield from (LAYOUT_FILE, *config.external_weight_files)
    own = config.output_vocab_size != config.vocab_size and config.backend != "simulated"
    if is_draft and own:
        yield VOCABULARY_FILE


def _corrupt(name: str, what: str) -> HearthError:
    return HearthError("engine_corrupt", f"{name} {what}: export the model again", name)
