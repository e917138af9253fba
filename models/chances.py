"""Random choices of generated text, by shares."""

from collections.abc import Mapping
from random import Random


def likely(rng: Random, share: float) -> bool:
    """Return true in this share of the calls."""
    return rng.random() < share


def weighted(rng: Random, shares: Mapping[str, float]) -> str:
    """Return one of the keys, each as often as its share says."""
    return rng.choices(list(shares), list(shares.values()))[0]
