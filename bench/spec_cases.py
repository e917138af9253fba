"""The cases of `bench spec`: which method, at which batch size."""

from typing import Literal, NamedTuple

from runtime.config import LLMEngineRunnerConfig
from runtime.options import EagleDraftingConfig

PREFIXES = ("cpu", "ort-cuda", "tensorrt")
VERIFY_BATCHES = (1, 3, 8)
VERIFY_SHAPES = tuple(
    EagleDraftingConfig(drafting_top_k=top_k, drafting_step=step, verify_tree_size=nodes)
    for top_k, step, nodes in ((10, 6, 60), (4, 3, 16), (1, 4, 5), (8, 1, 9))
)
_EAGLE_BATCHES, _LOOKUP_BATCHES, _MIXED_BATCH = (1, 2, 4, 8), (1, 8), 8


class SpecCase(NamedTuple):
    """A case; `mixed` times steps in which half of the rows speculate."""

    name: str
    kind: Literal["eagle", "lookup", "mixed"]
    batch: int


def spec_cases(prefix: str) -> dict[str, SpecCase]:
    """The cases of an engine, by name; those of a draft are named after what runs it."""
    found = [SpecCase(f"{prefix}/b{batch}", "eagle", batch) for batch in _EAGLE_BATCHES]
    found += [SpecCase(f"lookup/b{batch}", "lookup", batch) for batch in _LOOKUP_BATCHES]
    found.append(SpecCase(f"mixed/b{_MIXED_BATCH}", "mixed", _MIXED_BATCH))
    return {case.name: case for case in found}


ALL_CASES = tuple(dict.fromkeys(name for prefix in PREFIXES for name in spec_cases(prefix)))


def verified_shapes(config: LLMEngineRunnerConfig) -> tuple[EagleDraftingConfig, ...]:
    """The shapes that a base engine with a draft takes."""
    return tuple(
        shape for shape in VERIFY_SHAPES if shape.drafting_top_k == 1 or not config.chains_only
    )


def prefix_of(config: LLMEngineRunnerConfig) -> str:
    """What the cases of this engine's draft are named after."""
    if config.device == "cpu":
        return "cpu"
    return "tensorrt" if config.backend == "tensorrt" else "ort-cuda"


def shape_name(shape: EagleDraftingConfig) -> str:
    """Top-k, steps and nodes: `10-6-60`."""
    return f"{shape.drafting_top_k}-{shape.drafting_step}-{shape.verify_tree_size}"
