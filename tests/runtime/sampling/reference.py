"""Plain implementations, one Python loop each, that the vectorised code is compared with."""

import math
from collections.abc import Sequence

from hearth.runtime.request import RequestOptions


def ranked(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def adjusted(
    logits: Sequence[float], params: RequestOptions, token_ids: Sequence[int], prompt_length: int
) -> list[float]:
    scores = list(logits)
    for i in set(token_ids):
        factor = params.repetition_penalty
        scores[i] = scores[i] / factor if scores[i] > 0 else scores[i] * factor
    for i in set(token_ids[prompt_length:]):
        times = token_ids[prompt_length:].count(i)
        scores[i] -= params.presence_penalty + params.frequency_penalty * times
    for i, bias in params.logit_bias:
        scores[i] += bias
    return scores


def distribution(scores: Sequence[float], params: RequestOptions) -> dict[int, float]:
    """Probability of each token that passes the filters; `scores` before the temperature."""
    highest = max(scores)
    weights = [math.exp((s - highest) / params.temperature) for s in scores]
    kept = ranked(weights)
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        kept = nucleus(kept, weights, params.top_p)
    kept = [i for i in kept if weights[i] >= params.min_p]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


def nucleus(order: Sequence[int], weights: Sequence[float], top_p: float) -> list[int]:
    wanted = top_p * sum(weights[i] for i in order)
    kept: list[int] = []
    mass = 0.0
    for i in order:
        kept.append(i)
        mass += weights[i]
        if mass >= wanted:
            break
    return kept
