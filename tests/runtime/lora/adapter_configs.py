"""Configurations of engines that take adapters, of the size of a reference model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from hearth.runtime.config import LORA_TARGETS, LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.export.model_config import load_model_config
from tests.references import reference_folder
from tests.runtime.engine_configs import small_config

BASE = reference_folder("qwen3")


def adapter_config(rank: int = 8, **fields: Any) -> LLMEngineRunnerConfig:
    """An engine of BASE for adapters up to `rank`."""
    model = load_model_config(BASE)
    return structs.replace(
        small_config(),
        num_decoder_layers=model.num_layers,
        num_attention_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        max_supported_lora_rank=rank,
        lora_targets=LORA_TARGETS if rank else (),
        **fields,
    )


def refusal(
    read: Callable[[Path, LLMEngineRunnerConfig], object], folder: Path
) -> HearthError | None:
    """The error of reading the adapter in `folder`, or None where it is read."""
    try:
        read(folder, adapter_config())
    except HearthError as error:
        return error
    return None
