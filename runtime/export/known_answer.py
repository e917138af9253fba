"""The answer that an engine has to give, computed from the model itself."""

import numpy as np
from numpy.typing import NDArray

from runtime.config import LLMEngineRunnerConfig
from runtime.errors import HearthError
from runtime.export.model_config import ModelConfig
from runtime.export.reference_pass import reference_logits
from runtime.export.rounded_weights import RoundedWeights
from runtime.known_answer import FORCING_BIAS, KnownAnswer

LENGTH = 32
LEAST_TOLERANCE = 1e-3
"""By how much a lead may be off at least, in standard deviations of the logits: float32's."""
ROUNDINGS = {"float32": 0, "float16": 10, "bfloat16": 10, "int8": 3, "int4": 3}
"""By how much it may for each type of weights, in what rounding the products' inputs alone does.

What was measured stands in docs/performance.md.
"""


class Rehearsal(RoundedWeights):
    """Weights for two sequences, of which the second puts rounded inputs into every product."""

    def project(self, x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        """The products [2, T, out] of x [2, T, in] and of what an engine may make of it."""
        return super().project(np.stack((x[0], self.rounded_inputs(x[1]))), name)


def known_answer(
    model: ModelConfig, weights: Rehearsal, config: LLMEngineRunnerConfig
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
        logits, rounded = reference_logits(model, weights, [ids, ids])
    if not (np.isfinite(logits).all() and np.isfinite(rounded).all()):
        raise HearthError(
            "model_invalid", f"the model computes numbers that are not finite in {config.dtype}"
        )
    best = logits.argmax(axis=1)
    leads = _leads(logits, best)
    # Only a CPU's products round their inputs to 8 bits.
    whole = config.weight_quantization == "none" or config.device == "cuda"
    kind = config.dtype if whole else config.weight_quantization
    off = float(np.abs(_leads(rounded, best) - leads).max())
    tolerance = max(LEAST_TOLERANCE * float(logits.std()), ROUNDINGS[kind] * off)
    tolerance = min(tolerance, FORCING_BIAS)
    behind = logits.max(axis=1)[:-1] - logits[np.arange(LENGTH - 1), ids[1:]]
    taken = 1 + int(np.argmax(np.append(behind > FORCING_BIAS - tolerance, True)))
    return KnownAnswer(
        token_ids=tuple(ids[:taken]),
        best=tuple(best[:taken].tolist()),
        leads=tuple(leads[:taken].tolist()),
        tolerance=tolerance,
    )


def _leads(logits: NDArray[np.float32], best: NDArray[np.intp]) -> NDArray[np.float32]:
    """By how much these tokens' logits [T, V] exceed all others."""
    places = np.arange(len(best))
    others = logits.copy()
    others[places, best] = -np.inf
    leads: NDArray[np.float32] = logits[places, best] - others.max(axis=1)
    return leads
