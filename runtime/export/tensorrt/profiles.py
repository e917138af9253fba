"""The optimisation profiles of a plan: smallest, typical and largest shape of every input."""

from collections.abc import Sequence
from typing import get_args

from runtime.config import LLMEngineRunnerConfig
from runtime.tensors.profiles import Profile, Selector
from runtime.tensors.registry import build_registry_for_llm

Shapes = list[list[int]]
ProfileTable = list[dict[str, Shapes]]


def profile_table(config: LLMEngineRunnerConfig, profiles: Sequence[Profile]) -> ProfileTable:
    """For each profile, by input: the three shapes that the registry gives for its dims.

    The rotary tables are absent: their shape is fixed in the graph.
    """
    inputs = [one for one in build_registry_for_llm(config).specs if one.direction == "input"]
    return [
        {
            spec.name: [list(spec.resolve(profile.select(one))) for one in get_args(Selector)]
            for spec in inputs
        }
        for profile in profiles
    ]
