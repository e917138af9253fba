from pathlib import Path
from typing import Any

import numpy as np

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import Device
from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager, RotaryRows
from hearth.runtime.lora.lora_manager import LoRAManager
from hearth.runtime.runner.engine_tables import EngineTables, load_tables
from hearth.runtime.tensors.tensor import Tensor, numpy_dtype
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager

_SMALLEST = 256
"""Bytes of zeros at whose address inputs of rank 0 lie."""


class SharedResources:
    """Resources that live as long as the process and serve every step.

    They are made before any engine, from the files of the engine folder. Caches and rotary tables
    have one entry per engine; index 0 is the base engine, 1 the draft. `embedding` [V, H] holds the
    embedding of every token. `full_ids` [draft vocabulary] int32 gives the token of each draft id;
    None if ids and tokens are the same. `rotary_rows` holds the tables of engines with a table for
    each row. `external_weights` are the weights of a base engine whose graph has none,
    `draft_weights` the weights of a draft of kernels. `zero_buffer` holds bytes that stay zero
    (`allocate_zero_buffer`). `lora` manages adapters; None if the base takes none.
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
        """Make the resources that a decoder shares with its draft, and its own caches and tables.

        `weights` is a file of external weights in place of the folder's own. The buffer of zeros
        has at least `zeros` bytes, for its other readers. Raises `engine_corrupt` or
        `weights_invalid` naming a file that is missing or does not fit the configuration,
        `out_of_memory` if the caches cannot be reserved.
        """
        external = ExternalWeightManager.open(folder, config, weights)
        tables = load_tables(config, folder, external)
        return cls.create(config, tables, device, external, zeros=zeros)

    @classmethod
    def create(
        cls,
        config: LLMEngineRunnerConfig,
        tables: EngineTables,
        device: Device,
        external: ExternalWeightManager | None = None,
        *,
        zeros: int = 0,
    ) -> "SharedResources":
        """Make the resources from tables that have been read; raises `out_of_memory`."""
        embedding = device.constants({"embedding": tables.embedding})["embedding"]
        if external is not None:
            external.load(device, embedding)
        resources = cls([_create_caches(config, device)], embedding, external)
        resources.add_rope(config, tables, device)
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

        `folder` is the draft's own. Raises the errors of `create_for_llm`, and `internal` for a
        second draft.
        """
        self.add_draft_tables(config, load_tables(config, folder, None), device)
        self.draft_weights = ExternalWeightManager.open(folder, config)
        if self.draft_weights is not None:
            self.draft_weights.load(device)

    def add_draft_tables(
        self, config: LLMEngineRunnerConfig, tables: EngineTables, device: Device
    ) -> None:
        """Add a draft from tables that have been read, without weights."""
        if len(self.cache_managers) > 1:
            raise HearthError("internal", "the base has a draft already")
        self.add_rope(config, tables, device)
        self.cache_managers.append(_create_caches(config, device))
        if config.use_context_dependent_rope:
            self.cache_managers[1].rotary = self.rotary_rows[-1]
        if tables.full_ids is not None:
            self.full_ids = device.constant("full_ids", tables.full_ids)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """The beginning of the buffer of zeros; raises `internal` if that is too small."""
        if self.zero_buffer is None:
            raise HearthError("internal", "there is no buffer of zeros", name)
        return self.zero_buffer.beginning(name, shape, dtype)

    @property
    def rope(self) -> tuple[Tensor, ...]:
        """The rotary tables of the base engine."""
        return self.rope_tables[0]

    def add_rope(self, config: LLMEngineRunnerConfig, tables: EngineTables, device: Device) -> None:
        """Add the rotary tables of an engine."""
        if config.use_context_dependent_rope:
            self.rotary_rows.append(RotaryRows(config, dict(tables.rope), device))
            self.rope_tables.append(self.rotary_rows[-1].tensors)
        else:
            constants = (device.constant(f"rope_{name}", one) for name, one in tables.rope.items())
            self.rope_tables.append(tuple(constants))


def zero_bytes(config: LLMEngineRunnerConfig, max_batch: int) -> int:
    """Bytes of zeros that the steps of a decoder bind: deepstack features of no image."""
    if not config.num_deepstack_features:
        return 0
    places = max_batch * max(1, config.max_verify_tree_size)
    return places * config.hidden_size * numpy_dtype(config.dtype).itemsize


def allocate_zero_buffer(resources: SharedResources, nbytes: int, device: Device) -> None:
    """Let the one buffer of zeros have `nbytes` bytes; its largest reader must ask first.

    Steps bind it for an input that is absent; no step writes to it.
    """
    if resources.zero_buffer is not None and resources.zero_buffer.nbytes >= nbytes:
        return
    resources.zero_buffer = device.zeros("zeros", (nbytes,), np.dtype(np.uint8))
    resources.zero_buffer.protect()


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
