from collections.abc import Sequence
from itertools import product
from typing import Literal, NamedTuple

from hearth.runtime.config import DRAFT_ARCHITECTURE, DeviceKind, LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError

PROFILE_CONTEXT = 0
"""Index of the profile of prefill steps."""
PROFILE_GENERATION = 1
"""Index of the first profile of decode, verify, proposal and accept steps."""


class InferenceDims(NamedTuple):
    """The six sizes of a step, and the only source of its shapes.

    `kv_len` counts the cache slots per row in the bucket in use. Every row has a start index.
    A tree mask has as many columns as the step has tokens, in every phase.
    """

    batch: int
    seq_len: int
    kv_len: int
    select_len: int
    attn_mask_seq_len: int
    start_index_len: int

    @property
    def mask_words(self) -> int:
        """Words of 32 bits that each token's mask takes."""
        return -(-self.attn_mask_seq_len // 32)

    @classmethod
    def prefill(cls, batch: int, seq_len: int, kv_len: int) -> "InferenceDims":
        """A prompt chunk of `seq_len` tokens a row, logits for the last of them."""
        return cls._of(batch, seq_len, kv_len, 1)

    @classmethod
    def decode(cls, batch: int, kv_len: int) -> "InferenceDims":
        """Make the dims of one token a row."""
        return cls._of(batch, 1, kv_len, 1)

    @classmethod
    def spec_verify(cls, batch: int, verify: int, kv_len: int) -> "InferenceDims":
        """A tree of `verify` tokens a row, logits for all of them."""
        return cls._of(batch, verify, kv_len, verify)

    @classmethod
    def proposal(cls, batch: int, proposal: int, top_k: int, kv_len: int) -> "InferenceDims":
        """A draft tree of `proposal` tokens a row, logits for the `top_k` newest."""
        return cls._of(batch, proposal, kv_len, top_k)

    @classmethod
    def accept(cls, batch: int, accepted: int, kv_len: int) -> "InferenceDims":
        """`accepted` tokens a row for the draft's cache, logits for the last of them."""
        return cls._of(batch, accepted, kv_len, 1)

    @classmethod
    def _of(cls, batch: int, seq_len: int, kv_len: int, select_len: int) -> "InferenceDims":
        return cls(
            batch=batch,
            seq_len=seq_len,
            kv_len=kv_len,
            select_len=select_len,
            attn_mask_seq_len=seq_len,
            start_index_len=batch,
        )


class TowerDims(NamedTuple):
    """The sizes of a call of a vision tower: patches, and the tokens that they become."""

    patches: int
    tokens: int


StepDims = InferenceDims | TowerDims
"""The sizes of a run of any engine."""


SMALLEST_BUCKET = 256


def bucket_sizes(capacity: int, device: DeviceKind = "cpu") -> tuple[int, ...]:
    """Slots per row that a cache may use: 256, 384, 512, 768, 1024, 2048, ... and `capacity`.

    Attention on a CPU costs by them, filled or not, so there are more where most rows end.
    On a GPU the only size is `capacity`: rows of another stride cannot be re-laid in parallel,
    and each size would need graphs of its own.
    """
    if device != "cpu":
        return (capacity,)
    doubled = doubled_sizes(capacity)
    between = (size + size // 2 for size in doubled[:2])
    return tuple(sorted({*doubled, *(size for size in between if size < capacity)}))


def doubled_sizes(capacity: int) -> tuple[int, ...]:
    """256, 512, 1024, ... and at last `capacity` itself."""
    sizes = []
    size = SMALLEST_BUCKET
    while size < capacity:
        sizes.append(size)
        size *= 2
    return (*sizes, capacity)


def bucket_for(slots: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` with `slots`; raises `capacity_exceeded` when there is none."""
    for size in sizes:
        if size >= slots:
            return size
    raise HearthError(
        "capacity_exceeded", f"a row needs {slots} cache slots, a row has {sizes[-1]}", "max_tokens"
    )


PROMPT_GRAPHS = 32
"""The most prefill steps that are captured."""
_CAPTURED = (32, 64, 128, 256)

Selector = Literal["min", "opt", "max"]


class Profile(NamedTuple):
    """The smallest, the typical and the largest dims of one kind of step."""

    minimum: StepDims
    optimum: StepDims
    maximum: StepDims

    def select(self, selector: Selector) -> StepDims:
        """The dims that `selector` names."""
        return {"min": self.minimum, "opt": self.optimum, "max": self.maximum}[selector]

    def check(self, dims: StepDims) -> None:
        """Raise `invalid_value` naming the first member of `dims` outside this profile."""
        limits = zip(dims._fields, self.minimum, dims, self.maximum, strict=True)
        for member, low, size, high in limits:
            if not low <= size <= high:
                raise HearthError(
                    "invalid_value",
                    f"{member} is {size} in a step, the engine serves {low} to {high}",
                    member,
                )


def build_profiles(config: LLMEngineRunnerConfig) -> tuple[Profile, ...]:
    """The context profile (0) and the generation profiles of a decoder engine.

    There is one generation profile (1) for every size, or one for each of `static_dims`.
    """
    batch, slots = config.max_supported_batch_size, config.max_kv_cache_capacity
    chunk, few = min(config.prefill_chunk, slots), bucket_sizes(slots, config.device)[0]
    context = Profile(
        InferenceDims.prefill(1, 1, few),
        InferenceDims.prefill(batch, max(1, chunk // 2), slots),
        InferenceDims.prefill(batch, chunk, slots),
    )
    if config.static_decode_batches:
        return context, *(Profile(one, one, one) for one in static_dims(config))
    # A draft also takes the tokens of a round, of which a tree of chains gives one more than slots.
    widest = max(1, config.max_verify_tree_size, config.max_draft_tree_size + 1)
    longest = InferenceDims.spec_verify(batch, widest, slots)
    return context, Profile(InferenceDims.decode(1, few), longest, longest)


def decode_batches(config: LLMEngineRunnerConfig) -> tuple[int, ...]:
    """The batch sizes of decode steps; a batch between two of them runs padded to the larger.

    On the CPU every size, on a GPU, where each size has a graph, 1, 2, 4, 8, ... up to the limit.
    """
    limit = config.max_supported_batch_size
    if config.static_decode_batches:
        return config.static_decode_batches
    if config.device == "cpu":
        return tuple(range(1, limit + 1))
    powers = (1 << bit for bit in range((limit - 1).bit_length()))
    return (*powers, limit)


def prefill_widths(config: LLMEngineRunnerConfig) -> tuple[int, ...]:
    """The widths of prefill steps on a GPU, where a new shape costs far more than padding.

    16, 32, 48, 64, from there on four to an octave, and the longest chunk. None on the CPU, where a
    step may have any width.
    """
    if config.device == "cpu":
        return ()
    longest = min(config.prefill_chunk, config.max_kv_cache_capacity)
    sizes, size = list[int](), 16
    while size < longest:
        sizes.append(size)
        size += max(16, 1 << (size.bit_length() - 3))
    return (*sizes, longest)


def prefill_width(config: LLMEngineRunnerConfig, tokens: int, free_slots: int) -> int:
    """Return the width in which a chunk of `tokens` runs, with `free_slots` left in each row."""
    sizes = (*captured_widths(config), *prefill_widths(config))
    return next((size for size in sizes if tokens <= size <= free_slots), tokens)


def captured_widths(config: LLMEngineRunnerConfig) -> tuple[int, ...]:
    """The widths in which a prefill step of one row has graphs: 32, 64, 128 and 256 at most.

    They are few, as each place has its own, and far apart, as padding costs little where the time
    goes into reading weights. Those of kernels of our own: TensorRT captures static shapes alone,
    and ONNX Runtime's steps are not captured on a GPU.
    """
    if config.backend != "kernels":
        return ()
    longest = min(config.prefill_chunk, config.max_kv_cache_capacity)
    return tuple(sorted({min(size, longest) for size in _CAPTURED}))


def captured_prompts(config: LLMEngineRunnerConfig) -> list[tuple[int, int]]:
    """The places and widths of the prefill steps that are captured, the first places first."""
    widths = captured_widths(config)
    places = min(config.max_supported_batch_size, PROMPT_GRAPHS // max(1, len(widths)))
    return list(product(range(places), widths))


def generation_profile(config: LLMEngineRunnerConfig, batch: int, *, second: bool = False) -> int:
    """The index of the generation profile of a batch size out of `decode_batches`.

    `second` is the verification of a base, or a draft's step of the newest tokens of a round.
    """
    sizes = config.static_decode_batches
    if batch not in sizes:
        return PROFILE_GENERATION
    return PROFILE_GENERATION + sizes.index(batch) + (len(sizes) if second else 0)


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
