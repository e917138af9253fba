"""The tables that an engine folder brings beside its engine: numbers, or shapes alone."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.mapped_tensors import DTYPES, TensorFile, map_tensor
from hearth.runtime.engine_folder import EMBEDDING_FILE, ROPE_FILE, VOCABULARY_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.memory.sizes import projection_bytes
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager
from hearth.runtime.weights.weights_file import EMBEDDING, load_layout

_FLOAT = np.dtype(np.float32)
_ID = np.dtype(np.int32)
_BYTE = np.dtype(np.uint8)


class EngineTables(NamedTuple):
    """Arrays that become constants of a device, as `SharedResources` has them."""

    embedding: NDArray[Any]
    """[V, H]; of no use to a draft, which reads its base's."""
    rope: Mapping[str, NDArray[np.float32]]
    """Cosine and sine [positions, rotary_dim / 2]; none of an engine that has none."""
    full_ids: NDArray[np.int32] | None = None
    """[draft vocabulary]; None for a draft with the base's vocabulary."""
    weights: Mapping[str, NDArray[Any]] = MappingProxyType({})
    """Shapes of all other tensors that the engine binds, if the tables have shapes only."""


def load_tables(
    config: LLMEngineRunnerConfig, folder: Path, weights: ExternalWeightManager | None
) -> EngineTables:
    """Map the tables of an engine folder; raises `engine_corrupt` naming a file that does not fit.

    `weights` of an engine with external weights have the embedding table; None for any other.
    """
    if config.backend == "simulated":
        return _simulated_tables(config)
    if config.base_hidden_dim:
        embedding = shape_only((0, 0), numpy_dtype(config.dtype))
    else:
        embedding = _load_embedding(config, folder) if weights is None else weights.table
    ids = _load_full_ids(config, folder) if VOCABULARY_FILE in config.files else None
    return EngineTables(embedding, _load_rope(config, folder), ids)


def read_shapes(config: LLMEngineRunnerConfig, folder: Path) -> EngineTables:
    """Read the shapes of a folder's tables, and of weights that its engine binds, in file heads.

    Raises `engine_corrupt` naming a file that has no head.
    """
    found = assume_shapes(config)
    if config.backend == "simulated":
        return found
    found = found._replace(rope=_shapes_in(folder / ROPE_FILE))
    if VOCABULARY_FILE in config.files:
        found = found._replace(full_ids=_shapes_in(folder / VOCABULARY_FILE)["full_ids"])
    if not config.external_weight_files:
        tables = _shapes_in(folder / EMBEDDING_FILE) if EMBEDDING_FILE in config.files else {}
        return found._replace(embedding=tables.get(EMBEDDING, found.embedding))
    layout = load_layout(folder)
    entries = layout.tensors.items()
    stored = {name: shape_only(one.shape, DTYPES[one.dtype]) for name, one in entries}
    table = stored.pop(EMBEDDING, found.embedding)
    return found._replace(embedding=table, weights=stored if layout.bound else {})


def assume_shapes(config: LLMEngineRunnerConfig) -> EngineTables:
    """Derive the shapes of an engine of this configuration without a folder."""
    if config.backend == "simulated":
        return _simulated_tables(config)
    drafts = config.base_hidden_dim > 0
    table = (0, 0) if drafts else (config.vocab_size, config.hidden_size)
    embedding = shape_only(table, numpy_dtype(config.embedding_dtype or config.dtype))
    pairs = shape_only((config.max_kv_cache_capacity, config.rotary_dim // 2), _FLOAT)
    own = drafts and config.output_vocab_size != config.vocab_size
    ids = shape_only((config.output_vocab_size,), _ID) if own else None
    bound = config.backend == "kernels"
    weights = {"weights": shape_only((projection_bytes(config),), _BYTE)} if bound else {}
    return EngineTables(embedding, {"cos": pairs, "sin": pairs}, ids, weights)


def shape_only(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Make an array of this shape that takes no memory: its strides are zero."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _shapes_in(path: Path) -> dict[str, NDArray[Any]]:
    with closing(TensorFile(path, "engine_corrupt")) as file:
        return {name: shape_only(one.shape, one.dtype) for name, one in file.tensors.items()}


def _simulated_tables(config: LLMEngineRunnerConfig) -> EngineTables:
    """Each token's embedding is its own number: the simulated engine reads tokens back.

    There is no rotary table, unless rows have their own: then each position is its own number.
    """
    embedding = np.arange(config.vocab_size, dtype=np.float32)[:, None]
    if not config.use_context_dependent_rope:
        return EngineTables(embedding, {})
    pairs = np.ones(config.rotary_dim // 2, np.float32)
    table = np.arange(config.max_kv_cache_capacity, dtype=np.float32)[:, None] * pairs
    return EngineTables(embedding, {"cos": table, "sin": table})


def _load_embedding(config: LLMEngineRunnerConfig, folder: Path) -> NDArray[Any]:
    table = map_tensor(folder / EMBEDDING_FILE, "embedding")
    if table.shape != (config.vocab_size, config.hidden_size):
        raise HearthError(
            "engine_corrupt",
            f"{EMBEDDING_FILE} has shape {table.shape}, the configuration says "
            f"{(config.vocab_size, config.hidden_size)}",
            EMBEDDING_FILE,
        )
    return table


def _load_full_ids(config: LLMEngineRunnerConfig, folder: Path) -> NDArray[np.int32]:
    ids = np.array(map_tensor(folder / VOCABULARY_FILE, "full_ids"), np.int32)
    fits = ids.shape == (config.output_vocab_size,)
    if not fits or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise HearthError(
            "engine_corrupt",
            f"{VOCABULARY_FILE} must name a token below {config.vocab_size} for each of "
            f"{config.output_vocab_size} draft ids",
            VOCABULARY_FILE,
        )
    return ids


def _load_rope(config: LLMEngineRunnerConfig, folder: Path) -> dict[str, NDArray[np.float32]]:
    tables = {}
    for name in ("cos", "sin"):
        # The tables are small and read in every layer: a copy is aligned and stays resident.
        table = np.array(map_tensor(folder / ROPE_FILE, name), dtype=np.float32)
        wide = table.shape[1:] == (config.rotary_dim // 2,)
        if not wide or table.shape[0] < config.max_kv_cache_capacity:
            raise HearthError(
                "engine_corrupt",
                f"table {name} of {ROPE_FILE} has shape {table.shape}, which does not serve "
                f"{config.max_kv_cache_capacity} positions of {config.rotary_dim} rotary sizes",
                ROPE_FILE,
            )
        tables[name] = table
    return tables
