"""What the simulated engine must answer, computed without it."""

import numpy as np

from runtime.config import LLMEngineRunnerConfig
from runtime.executor.simulated_engine import simulated_next_tokens


def simulated_stream(config: LLMEngineRunnerConfig, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that follow the prompt's ids."""
    stream: list[int] = []
    last, position = prompt[-1], len(prompt) - 1
    for _ in range(count):
        last = int(
            simulated_next_tokens(
                np.array([last]), np.array([position]), config.vocab_size, config.eos_token_ids
            )[0]
        )
        position += 1
        stream.append(last)
    return stream
