"""Whether an engine fits into the memory that is free, before it is loaded."""

import msgspec
from runtime.memory import available_memory, predict_memory

from runtime.config import LLMEngineRunnerConfig
from runtime.errors import HearthError


class Budget(msgspec.Struct, frozen=True):
    """Bytes by part that an engine will need, and bytes that are free."""

    parts: dict[str, int]
    available: int

    @property
    def needed(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())

    def check(self) -> None:
        """Raise `out_of_memory` when it does not fit."""
        if self.needed > self.available:
            raise HearthError(
                "out_of_memory",
                f"the engine needs {self.needed >> 20} MiB and {self.available >> 20} MiB are "
                "free: lower max_batch or capacity, or export with int8 or int4",
                "capacity",
            )


def budget_of(config: LLMEngineRunnerConfig) -> Budget:
    """The budget of an engine with the limits of `config`, now."""
    parts = predict_memory(
        config,
        max_batch=config.max_supported_batch_size,
        capacity=config.max_kv_cache_capacity,
    )
    return Budget(parts, available_memory())
