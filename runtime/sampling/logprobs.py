import numpy as np
from numpy.typing import NDArray

from runtime.request import TopLogprob
from runtime.sampling.ranking import leading


def log_normaliser(logits: NDArray[np.float32], highest: np.float32) -> float:
    """The natural logarithm of the sum of exp(`logits`) [V], whose maximum is `highest`."""
    weights = np.exp(logits - highest)
    return float(highest) + float(np.log(weights.sum(dtype=np.float64)))


def top_logprobs(
    logits: NDArray[np.float32], normaliser: float, count: int
) -> tuple[TopLogprob, ...]:
    """The `count` likeliest tokens of the raw distribution, ranked; empty for 0."""
    if count == 0:
        return ()
    ids = leading(logits, count)
    return tuple(TopLogprob(int(i), float(logits[i]) - normaliser) for i in ids)
