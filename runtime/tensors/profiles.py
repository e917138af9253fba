from typing import Literal, NamedTuple

from runtime.caches.buckets import bucket_sizes
from runtime.config import LLMEngineRunnerConfig
from runtime.errors import HearthError
from runtime.tensors.dims import InferenceDims

Selector = Literal["min", "opt", "max"]


class Profile(NamedTuple):
    """The smallest, the typical and the largest dims of one kind of step."""

    minimum: InferenceDims
    optimum: InferenceDims
    maximum: InferenceDims

    def select(self, selector: Selector) -> InferenceDims:
        """The dims that `selector` names."""
        return {"min": self.minimum, "opt": self.optimum, "max": self.maximum}[selector]

    def check(self, dims: InferenceDims) -> None:
        """Raise `invalid_value` naming the first member of `dims` outside this profile."""
        limits = zip(InferenceDims._fields, self.minimum, dims, self.maximum, strict=True)
        for member, low, size, high in limits:
            if not low <= size <= high:
                raise HearthError(
                    "invalid_value",
                    f"{member} is {size} in a step, the engine serves {low} to {high}",
                    member,
                )


def build_profiles(config: LLMEngineRunnerConfig) -> tuple[Profile, Profile]:
    """The context (0) and the generation (1) profile of a decoder engine."""
    batch, slots = config.max_supported_batch_size, config.max_kv_cache_capacity
    chunk, few = min(config.prefill_chunk, slots), bucket_sizes(slots)[0]
    context = Profile(
        InferenceDims.prefill(1, 1, few),
        InferenceDims.prefill(batch, max(1, chunk // 2), slots),
        InferenceDims.prefill(batch, chunk, slots),
    )
    longest = InferenceDims.decode(batch, slots)
    return context, Profile(InferenceDims.decode(1, few), longest, longest)
