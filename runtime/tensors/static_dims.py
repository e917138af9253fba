"""The steps that a TensorRT plan with static generation profiles was built for."""

from runtime.config import DRAFT_ARCHITECTURE, LLMEngineRunnerConfig
from runtime.tensors.dims import PROFILE_GENERATION, InferenceDims


def static_dims(config: LLMEngineRunnerConfig) -> tuple[InferenceDims, ...]:
    """The dims of the generation profiles, profile 1 on, for each static batch size.

    A base engine decodes and then, if it takes token trees, verifies the largest of them. A draft
    engine runs whole proposals, and then the newest tokens of a round.
    """
    sizes, slots = config.static_decode_batches, config.max_kv_cache_capacity
    if config.architecture == DRAFT_ARCHITECTURE:
        top_k, step = config.static_drafting
        proposals = (InferenceDims.proposal(one, top_k * step, top_k, slots) for one in sizes)
        return *proposals, *(InferenceDims.accept(one, step + 1, slots) for one in sizes)
    decodes = tuple(InferenceDims.decode(one, slots) for one in sizes)
    nodes = config.max_verify_tree_size
    if not config.enable_eagle_spec_decode:
        return decodes
    return *decodes, *(InferenceDims.spec_verify(one, nodes, slots) for one in sizes)


def proposal_profile(config: LLMEngineRunnerConfig, batch: int) -> int:
    """The index of a draft's profile of proposal steps of a batch size."""
    return _index(config, batch, 0)


def accept_profile(config: LLMEngineRunnerConfig, batch: int) -> int:
    """The index of a draft's profile of steps of a round's newest tokens, of a batch size."""
    return _index(config, batch, len(config.static_decode_batches))


def _index(config: LLMEngineRunnerConfig, batch: int, first: int) -> int:
    if batch not in config.static_decode_batches:
        return PROFILE_GENERATION
    return PROFILE_GENERATION + first + config.static_decode_batches.index(batch)
