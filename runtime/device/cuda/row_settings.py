import numpy as np
from numpy.typing import NDArray

from runtime.request import RequestOptions

# `Row` of csrc/sampling/rows.cuh and the flags of its tables.
ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("top_k", np.int32),
        ("logprobs", np.int32),
        ("flags", np.uint32),
    ]
)
HISTORY, BIAS = 1, 2
_SMALLEST = float(np.finfo(np.float32).tiny)

SettingsRow = tuple[int, float, float, float, float, float, float, int, int, int]


def row_settings(params: RequestOptions, vocab_size: int) -> SettingsRow:
    """A row's settings as a value of `ROW`; filters that keep every token are off."""
    penalised = (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )
    # As in `runtime.sampling.draw.tempered`: above 0, but too small for a float32.
    temperature = max(params.temperature, _SMALLEST) if params.temperature else 0.0
    return (
        params.seed or 0,
        params.top_p,
        temperature,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        params.top_k if params.top_k < vocab_size else 0,
        -1 if params.logprobs is None else params.logprobs,
        (HISTORY if penalised else 0) | (BIAS if params.logit_bias else 0),
    )


def row_biases(params: RequestOptions) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Biased tokens and their biases."""
    ids = np.array([token_id for token_id, _ in params.logit_bias], np.int32)
    return ids, np.array([bias for _, bias in params.logit_bias], np.float32)


def is_greedy(settings: SettingsRow) -> bool:
    """Whether an argmax over the raw logits is all that the row asks for."""
    return settings[2] == 0 and settings[8] < 0 and not settings[-1]
