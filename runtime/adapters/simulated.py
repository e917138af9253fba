"""An adapter of a simulated engine, which has no projections: it changes what tokens follow."""

from zlib import crc32

import numpy as np

from runtime.adapters.adapter import Adapter, LowRank
from runtime.config import LLMEngineRunnerConfig

_SHIFTS = 251


def simulated_shift(name: str) -> int:
    """By how much the adapter of this name moves the rank of each next token; 0 for none."""
    return 1 + crc32(name.encode()) % _SHIFTS if name else 0


def simulated_adapter(name: str, config: LLMEngineRunnerConfig) -> Adapter:
    """What a simulated engine binds in place of any adapter of this name."""
    size = config.num_attention_heads * config.head_dim
    a = np.ones((config.hidden_size, 1), np.float32)
    b = np.full((1, size), simulated_shift(name), a.dtype)
    return Adapter(1, "", f"simulated {name}", {(0, "q"): LowRank(a, b)})
