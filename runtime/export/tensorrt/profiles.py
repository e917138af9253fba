"""The optimisation profiles of a plan: smallest, typical and largest shape of every input."""

from collections.abc import Sequence
from typing import get_args

from runtime.config import DRAFT_ARCHITECTURE, LLMEngineRunnerConfig
from runtime.tensors.profiles import Profile, Selector
from runtime.tensors.registry import build_registry_for_llm, build_registry_for_spec_decode_draft

Shapes = list[list[int]]
ProfileTable = list[dict[str, Shapes]]


def profile_table(config: LLMEngineRunnerConfig, profiles: Sequence[Profile]) -> ProfileTable:
    """For each profile, by input: the three shapes that the registry gives for its dims.

    The rotary tables are absent: their shape is fixed in the graph.
    """
    is_draft = config.architecture == DRAFT_ARCHITECTURE
    build = build_registry_for_spec_decode_draft if is_draft else build_registry_for_llm
    inputs = [one for one in build(config).specs if one.direction == "input"]
    return [
        {
            spec.name: [list(spec.resolve(profile.select(one))) for one in get_args(Selector)]
            for spec in inputs
        }
        for profile in profiles
    ]
