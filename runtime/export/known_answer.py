"""Known answer of an engine, computed from the model itself."""

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import Drift, LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.export.model_config import ModelConfig
from hearth.runtime.export.reference_pass import RoundedWeights, reference_logits
from hearth.runtime.known_answer import FORCING_BIAS, KnownAnswer

LENGTH = 32
LEAST_TOLERANCE = 1e-3
"""Least error of a lead that is allowed, in standard deviations of the logits: float32's."""
ROUNDINGS = {"float32": 0, "float16": 10, "bfloat16": 10, "int8": 3, "int4": 3}
"""Error of a lead that is allowed for each type of weights, as a multiple of the error from
rounding the inputs of products alone.

Measurements are in docs/lab/weights-and-answers.md.
"""


class ToleranceProbe(RoundedWeights):
    """Weights for two sequences, of which the second has rounded inputs in every product."""

    def project(self, x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        """Products [2, T, out] of x [2, T, in], of which the second is rounded first."""
        return super().project(np.stack((x[0], self.rounded_inputs(x[1]))), name)


class ReferenceLogits(NamedTuple):
    """Logits [T, V] behind `ids`, exact and with rounded inputs in every product."""

    ids: list[int]
    logits: NDArray[np.float32]
    rounded: NDArray[np.float32]


def run_probe(
    model: ModelConfig, weights: ToleranceProbe, config: LLMEngineRunnerConfig
) -> ReferenceLogits:
    """Run the model over ids from all over its vocabulary, the same for every model of its size.

    Raises `model_invalid` for numbers that are not finite.
    """
    if model.vocab_size < 2:  # noqa: PLR2004 - the first two are compared
        raise HearthError("model_unsupported", "a model of one token answers nothing", "vocab_size")
    # Multiples of the golden ratio spread evenly, however many are taken (Knuth, volume 3, 6.4).
    steps = (number * 2_654_435_761 % (1 << 32) for number in range(1, LENGTH + 1))
    ids = [step * model.vocab_size >> 32 for step in steps]
    # A gate far below zero is closed by an infinite power; other infinities end up in the logits.
    with np.errstate(over="ignore", invalid="ignore"):
        logits, rounded = reference_logits(model, weights, [ids, ids])
    for numbers in (logits, rounded):
        _check_finite(numbers, f" in {config.dtype}")
    return ReferenceLogits(ids, logits, rounded)


def known_answer(reference: ReferenceLogits, config: LLMEngineRunnerConfig) -> KnownAnswer:
    """Compute the known answer; its ids end before one that could not be forced."""
    ids, logits, rounded = reference
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


def unquantised(config: LLMEngineRunnerConfig) -> LLMEngineRunnerConfig:
    """The configuration of the same model with weights as they are, in the engine's type."""
    return msgspec.structs.replace(
        config,
        weight_quantization="none",
        head_quantization="none",
        weight_block_size=0,
        embedding_dtype=None,
    )


def measure_drift(model: ModelConfig, whole: RoundedWeights, reference: ReferenceLogits) -> Drift:
    """Measure how far the logits of quantised weights are from those of `whole` ones.

    Raises `model_invalid` for numbers that are not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        logits = reference_logits(model, whole, reference.ids)
    _check_finite(logits)
    # One position at a time: all of a large vocabulary in float64 would take more than the model.
    divergence = [_divergence(*rows) for rows in zip(logits, reference.logits, strict=True)]
    return Drift(
        positions=len(divergence),
        same=int(np.count_nonzero(logits.argmax(axis=-1) == reference.logits.argmax(axis=-1))),
        mean=float(np.mean(divergence)),
        largest=max(divergence),
    )


def _check_finite(numbers: NDArray[np.float32], where: str = "") -> None:
    if not np.isfinite(numbers).all():
        raise HearthError("model_invalid", f"the model computes numbers that are not finite{where}")


def _divergence(logits: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Kullback-Leibler divergence, in nats, of other logits [V] from `logits` [V]."""
    wanted, found = _log_shares(logits), _log_shares(other)
    return float(np.sum(np.exp(wanted) * (wanted - found)))


def _log_shares(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64) - logits.max()
    shares: NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return shares


def _leads(logits: NDArray[np.float32], best: NDArray[np.intp]) -> NDArray[np.float32]:
    """Leads [T] of the logits of tokens `best` [T] over all others in `logits` [T, V]."""
    places = np.arange(len(best))
    others = logits.copy()
    others[places, best] = -np.inf
    leads: NDArray[np.float32] = logits[places, best] - others.max(axis=1)
    return leads
