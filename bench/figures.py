"""Times of interleaved steps turned into the figures that `bench decode` reports."""

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from bench.floor import plain_passes, repeats

SHARE_LIMIT = 1.02
"""A share of the floor above this says that the floor was not measured well."""


class DecodeFigures(msgspec.Struct, kw_only=True):
    """One case; ratios above 1 mean that Hearth is ahead, None that the peer did not run.

    `floor_share` is the floor's time over a step's, `plain_read_share` that of a plain read from
    one end to the other, which is no bound. `same_tokens` counts the leading tokens that
    a peer with the same float weights chose like Hearth.
    """

    tokens_per_s: float
    floor_share: float
    vs_transformers: float | None
    vs_llama_cpp: float | None
    step_ms: float
    floor_ms: float
    floor_gb_per_s: float
    plain_read_share: float
    plain_read_gb_per_s: float
    transformers_ms: float | None
    transformers_precision: str
    llama_cpp_ms: float | None
    tokens: int
    same_tokens: dict[str, int] = {}
    notes: list[str] = []

    @property
    def credible(self) -> bool:
        """Whether no step was faster than memory allows."""
        return self.floor_share <= SHARE_LIMIT


def decode_figures(
    seconds: Mapping[str, Sequence[float]],
    *,
    weight_bytes: int,
    tokens: Mapping[str, Sequence[int]],
    precision: str,
    notes: Sequence[str],
) -> DecodeFigures:
    """Medians of the steps of each contender (seconds by name), the best of the floor's passes.

    `tokens` holds what each contender of equal weights said; the others are compared with "hearth".
    """
    said_here = tokens.get("hearth", ())
    step = median(seconds["hearth"])
    floor = min(seconds["floor"]) / repeats(weight_bytes)
    plain = min(plain_passes(seconds["floor"])) / repeats(weight_bytes)
    return DecodeFigures(
        tokens_per_s=1 / step,
        floor_share=floor / step,
        vs_transformers=_ratio(seconds.get("transformers"), step),
        vs_llama_cpp=_ratio(seconds.get("llama_cpp"), step),
        step_ms=1000 * step,
        floor_ms=1000 * floor,
        floor_gb_per_s=weight_bytes / floor / 1e9,
        plain_read_share=plain / step,
        plain_read_gb_per_s=weight_bytes / plain / 1e9,
        transformers_ms=_milliseconds(seconds.get("transformers")),
        transformers_precision=precision,
        llama_cpp_ms=_milliseconds(seconds.get("llama_cpp")),
        tokens=len(said_here),
        same_tokens={
            name: common_prefix(said_here, said)
            for name, said in tokens.items()
            if name != "hearth"
        },
        notes=list(notes),
    )


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading elements are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def _ratio(times: Sequence[float] | None, step: float) -> float | None:
    return median(times) / step if times else None


def _milliseconds(times: Sequence[float] | None) -> float | None:
    return 1000 * median(times) if times else None
