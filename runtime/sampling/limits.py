import math

from runtime.errors import HearthError
from runtime.request import SamplingParams

# Lowest and highest value of each number; the protocol has the same.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 1 << 20),
    "top_p": (math.ulp(0.0), 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (0, (1 << 64) - 1),
}
_BIAS = (-100.0, 100.0)
_MAX_LOGPROBS = 20


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse a setting outside its range with `invalid_value` and its name as the field."""
    for name, (low, high) in _RANGES.items():
        _check(name, getattr(params, name), low, high)
    if params.logprobs is not None:
        _check("logprobs", params.logprobs, 0, min(_MAX_LOGPROBS, vocab_size))
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise HearthError(
                "invalid_value",
                f"logit_bias names token {token_id}, the model has tokens 0 to {vocab_size - 1}",
                "logit_bias",
            )
        _check("logit_bias", bias, *_BIAS)


def _check(name: str, value: float, low: float, high: float) -> None:
    # Written so that a NaN, which compares with nothing, is refused as well.
    if not low <= value <= high:
        least = "above 0" if low == math.ulp(0.0) else f"at least {_shown(low)}"
        raise HearthError(
            "invalid_value", f"{name} must be {least} and at most {_shown(high)}", name
        )


def _shown(bound: float) -> str:
    # The bounds of whole numbers are exact: no digit of them is left out.
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
