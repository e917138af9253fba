"""The answer that a tower has to give, computed from the model itself."""

import numpy as np

from runtime.errors import HearthError
from runtime.export.known_answer import LEAST_TOLERANCE, ROUNDINGS, Rehearsal
from runtime.export.vision.reference_tower import reference_outputs
from runtime.export.vision.tower_model import TowerModel
from runtime.tensors.dtypes import numpy_dtype
from runtime.tower_answer import TowerAnswer, answer_pictures, mixed
from runtime.vision.tower_inputs import segments_of


def tower_answer(tower: TowerModel, weights: Rehearsal) -> TowerAnswer:
    """Run the tower over its pictures; raises `model_invalid` for numbers that are not finite.

    Tolerances are measured as those of a decoder: a second pass puts rounded inputs into every
    product.
    """
    pictures = answer_pictures(tower.config)
    patches = np.concatenate([patches for patches, _ in pictures])
    segments = [segment for _, layout in pictures for segment in segments_of(layout)]
    # As in a decoder, a gate far below zero is closed by an infinite power.
    with np.errstate(over="ignore", invalid="ignore"):
        both = reference_outputs(tower, weights, np.stack([patches, patches]), segments)
    exact, engine = np.stack(both, axis=1)
    dtype = tower.config.dtype
    if tower.config.output_dtype is not None:
        engine = engine.astype(numpy_dtype(tower.config.output_dtype)).astype(np.float32)
    mixes, rounded = mixed(exact), mixed(engine)
    if not (np.isfinite(mixes).all() and np.isfinite(rounded).all()):
        raise HearthError(
            "model_invalid", f"the vision tower computes numbers that are not finite in {dtype}"
        )
    off = ROUNDINGS[dtype] * np.abs(rounded - mixes).max(axis=(1, 2))
    least = LEAST_TOLERANCE * mixes.std(axis=(1, 2))
    return TowerAnswer(
        mixes=tuple(tuple(tuple(sums) for sums in output) for output in mixes.tolist()),
        tolerances=tuple(np.maximum(off, least).tolist()),
    )
