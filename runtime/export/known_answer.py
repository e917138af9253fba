"""The answer that an engine has to give, computed from the model itself."""

import numpy as np

from runtime.config import LLMEngineRunnerConfig
from runtime.errors import HearthError
from runtime.export.model_config import ModelConfig
from runtime.export.reference_pass import reference_logits
from runtime.export.rounded_weights import RoundedWeights
from runtime.known_answer import FORCING_BIAS, KnownAnswer

LENGTH = 32
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.8, "int8": 0.7, "int4": 0.7}
"""By how much a lead may be off for each type of weights, in standard deviations of all logits.

What was measured stands in docs/performance.md.
"""


def known_answer(
    model: ModelConfig, weights: RoundedWeights, config: LLMEngineRunnerConfig
) -> KnownAnswer:
    """Run the model over ids from all over its vocabulary, the same for every model of its size.

    They end before one that could not be forced. Raises `model_invalid` for numbers that are not
    finite.
    """
    if model.vocab_size < 2:  # noqa: PLR2004 - the first two are compared
        raise HearthError("model_unsupported", "a model of one token answers nothing", "vocab_size")
    # Multiples of the golden ratio spread evenly, however many are taken (Knuth, volume 3, 6.4).
    steps = (number * 2_654_435_761 % (1 << 32) for number in range(1, LENGTH + 1))
    ids = [step * model.vocab_size >> 32 for step in steps]
    # A gate far below zero is closed by an infinite power; other infinities end up in the logits.
    with np.errstate(over="ignore", invalid="ignore"):
        logits = reference_logits(model, weights, ids)
    if not np.isfinite(logits).all():
        raise HearthError("model_invalid", "the model computes numbers that are not finite")
    kinds = {config.dtype, config.weight_quantization} - {"none"}
    tolerance = max(TOLERANCES[kind] for kind in kinds) * float(logits.std())
    second, first = np.partition(logits, -2, axis=1)[:, -2:].T
    behind = first[:-1] - logits[np.arange(LENGTH - 1), ids[1:]]
    taken = 1 + int(np.argmax(np.append(behind > FORCING_BIAS - tolerance, True)))
    return KnownAnswer(
        token_ids=tuple(ids[:taken]),
        best=tuple(logits.argmax(axis=1)[:taken].tolist()),
        leads=tuple((first - second)[:taken].tolist()),
        tolerance=tolerance,
    )
