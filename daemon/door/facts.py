"""What clients are told of the service: the model, and the limits that hold."""

import msgspec
from msgspec import structs

from actors.messages import ExecutorLimits
from actors.settings import PolicySettings
from runtime.config import LLMEngineRunnerConfig
from runtime.version import VERSION


class DoorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What clients are told of the service, and how many generations run together (`places`).

    Lengths are in tokens. Requests may ask for one of `adapters`.
    """

    server: str
    model: str = ""
    prompt_tokens: int = 0
    total_tokens: int = 0
    places: int = 0
    engine: dict[str, str | int | float] = {}
    adapters: list[str] = []


def within(config: LLMEngineRunnerConfig, limits: ExecutorLimits) -> LLMEngineRunnerConfig:
    """The configuration with the limits that an executor told."""
    return structs.replace(
        config,
        max_supported_batch_size=limits.max_batch,
        max_supported_input_length=limits.max_prompt_tokens,
        max_kv_cache_capacity=limits.max_total_tokens,
    )


def door_facts(
    queue: PolicySettings,
    model: str,
    config: LLMEngineRunnerConfig,
    engine: dict[str, str | int | float],
) -> DoorFacts:
    """What clients are told; the longest prompt leaves room for one token of reply."""
    longest = min(config.max_supported_input_length, config.max_kv_cache_capacity - 1)
    return DoorFacts(
        server=f"hearth {VERSION}",
        model=model,
        prompt_tokens=min(longest, queue.queue_tokens),
        total_tokens=config.max_kv_cache_capacity,
        places=config.max_supported_batch_size,
        engine=engine,
    )
