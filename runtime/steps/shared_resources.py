from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.adapters.lora_manager import LoRAManager
from runtime.caches.hybrid_cache_manager import HybridCacheManager
from runtime.caches.rotary_rows import RotaryRows
from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device
from runtime.device.mapped_tensors import map_tensor
from runtime.engine_folder import EMBEDDING_FILE, ROPE_FILE, VOCABULARY_FILE
from runtime.errors import HearthError
from runtime.memory.sizes import zero_bytes
from runtime.tensors.dtypes import numpy_dtype
from runtime.tensors.tensor import Tensor
from runtime.weights.external_weight_manager import ExternalWeightManager

_SMALLEST = 256
"""Bytes of zeros at whose address inputs of rank 0 lie."""


class SharedResources:
    """What lives as long as the process and serves every step.

    Created before any engine, from the engine folder's files alone. Caches and rotary tables are
    one entry per engine; index 0 is the base engine, 1 the draft. `embedding` [V, H] holds the
    embedded form of every token. `full_ids` [draft vocabulary] int32 gives the token of each draft
    id, None where they are the same. `rotary_rows` keep the tables of engines with some of every
    row. `external_weights` are those of a base engine that has none itself, `draft_weights` those
    of a draft of kernels. `zero_buffer` are bytes that stay zero (`allocate_zero_buffer`). `lora`
    are the adapters of a base that takes any.
    """

    def __init__(
        self,
        cache_managers: list[HybridCacheManager],
        embedding: Tensor,
        external_weights: ExternalWeightManager | None = None,
    ) -> None:
        self.cache_managers = cache_managers
        self.embedding = embedding
        self.external_weights = external_weights
        self.draft_weights: ExternalWeightManager | None = None
        self.rope_tables: list[tuple[Tensor, ...]] = []
        self.rotary_rows: list[RotaryRows] = []
        self.full_ids: Tensor | None = None
        self.zero_buffer: Tensor | None = None
        self.lora: LoRAManager | None = None

    @classmethod
    def create_for_llm(
        cls,
        config: LLMEngineRunnerConfig,
        folder: Path,
        device: Device,
        weights: str = "",
        *,
        zeros: int = 0,
    ) -> "SharedResources":
        """All that a decoder has in common with its draft, and its own caches and tables.

        `weights` is a file of external weights in place of the folder's own. Others will read
        `zeros` bytes of the buffer of zeros. Raises `engine_corrupt` or
        `weights_invalid` naming a file that is missing or does not fit the configuration,
        `out_of_memory` when the caches cannot be reserved.
        """
        external = ExternalWeightManager.open(folder, config, weights)
        if config.backend == "simulated":
            table = _simulated_table(config)
        else:
            table = _load_embedding(config, folder) if external is None else external.table
        embedding = device.constants({"embedding": table})["embedding"]
        if external is not None:
            external.load(device, embedding)
        resources = cls([_create_caches(config, device)], embedding, external)
        resources.add_rope(config, folder, device)
        if resources.rotary_rows:
            resources.cache_managers[0].rotary = resources.rotary_rows[0]
        own = zero_bytes(config, config.max_supported_batch_size)
        allocate_zero_buffer(resources, max(_SMALLEST, own, zeros), device)
        if config.max_supported_lora_rank:
            nothing = resources.zeros("no_adapter", (2,), numpy_dtype(config.dtype))
            resources.lora = LoRAManager(config, device, nothing)
        return resources

    def add_draft(self, config: LLMEngineRunnerConfig, folder: Path, device: Device) -> None:
        """Add caches, rotary tables, vocabulary and weights beside a draft engine.

        `folder` is the draft's own. There is one: another one is `internal`. Raises as
        `create_for_llm`.
        """
        if len(self.cache_managers) > 1:
            raise HearthError("internal", "the base has a draft already")
        self.add_rope(config, folder, device)
        self.cache_managers.append(_create_caches(config, device))
        if config.use_context_dependent_rope:
            self.cache_managers[1].rotary = self.rotary_rows[-1]
        if VOCABULARY_FILE in config.files:
            self.full_ids = device.constant("full_ids", _load_full_ids(config, folder))
        self.draft_weights = ExternalWeightManager.open(folder, config)
        if self.draft_weights is not None:
            self.draft_weights.load(device)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """The beginning of the buffer of zeros; raises `internal` where it is too small."""
        if self.zero_buffer is None:
            raise HearthError("internal", "there is no buffer of zeros", name)
        return self.zero_buffer.beginning(name, shape, dtype)

    @property
    def rope(self) -> tuple[Tensor, ...]:
        """The rotary tables of the base engine."""
        return self.rope_tables[0]

    def add_rope(self, config: LLMEngineRunnerConfig, folder: Path, device: Device) -> None:
        """Add the rotary tables of an engine; raises as `create_for_llm`."""
        simulated = config.backend == "simulated"
        tables = _simulated_rope(config) if simulated else _load_rope(config, folder)
        if config.use_context_dependent_rope:
            self.rotary_rows.append(RotaryRows(config, tables, device))
            self.rope_tables.append(self.rotary_rows[-1].tensors)
        else:
            constants = (device.constant(f"rope_{name}", table) for name, table in tables.items())
            self.rope_tables.append(tuple(constants))


def allocate_zero_buffer(resources: SharedResources, nbytes: int, device: Device) -> None:
    """Let the one buffer of zeros have so many bytes; whoever reads most of it asks first.

    Everyone who has to bind something that is nothing reads it, and nobody writes to it.
    """
    if resources.zero_buffer is not None and resources.zero_buffer.nbytes >= nbytes:
        return
    resources.zero_buffer = device.zeros("zeros", (nbytes,), np.dtype(np.uint8))
    if device.kind == "cpu":
        resources.zero_buffer.array.flags.writeable = False


def _create_caches(config: LLMEngineRunnerConfig, device: Device) -> HybridCacheManager:
    try:
        return HybridCacheManager(config, device)
    except HearthError as error:
        if error.code != "out_of_memory":
            raise
        raise HearthError(
            "out_of_memory",
            f"no memory for {config.max_supported_batch_size} rows of "
            f"{config.max_kv_cache_capacity} cache slots: lower max_batch or capacity",
            "capacity",
        ) from error


def _simulated_table(config: LLMEngineRunnerConfig) -> NDArray[Any]:
    """Each token's embedding is its own number: the simulated engine reads tokens back."""
    return np.arange(config.vocab_size, dtype=np.float32)[:, None]


def _simulated_rope(config: LLMEngineRunnerConfig) -> dict[str, NDArray[np.float32]]:
    """None, unless rows have tables of their own: then each position is its own number."""
    if not config.use_context_dependent_rope:
        return {}
    pairs = np.ones(config.rotary_dim // 2, np.float32)
    table = np.arange(config.max_kv_cache_capacity, dtype=np.float32)[:, None] * pairs
    return {"cos": table, "sin": table}


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
