"""Figures of `bench vision`."""

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from hearth.bench.vision.asking import Asked, Rates
from hearth.bench.vision.text_rows import TextRowFigures

Span = tuple[float, float]
"""Beginning and end, in seconds of one clock."""
_TOP = "224x224"
_MIDDLE = "640x480"


class SizeFigures(msgspec.Struct, kw_only=True):
    """A JPEG of one size; medians in milliseconds, a ratio above 1 means that Hearth is ahead.

    `patches_ms` is from its bytes to the tower's input in one process; the times above it are of
    the daemon, stage by stage. `same_token`: both chose the same first token.
    """

    tokens: int
    tokenize_ms: float
    decode_ms: float
    resize_ms: float
    engine_ms: float
    hand_over_ms: float
    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    patches_ms: float
    transformers_ttft_ms: float | None = None
    ttft_vs_transformers: float | None = None
    transformers_patches_ms: float | None = None
    preprocess_vs_transformers: float | None = None
    torchvision_patches_ms: float | None = None
    preprocess_vs_torchvision: float | None = None
    same_token: bool | None = None


class BesideFigures(msgspec.Struct, kw_only=True):
    """Text and pictures a second, alone and both at once, by so many clients of either kind."""

    encoder_nice: int
    clients: int
    text_tokens_per_s_alone: float
    text_tokens_per_s: float
    images_per_s_alone: float
    images_per_s: float


class HiddenFigures(msgspec.Struct, kw_only=True):
    """Answers for 4 clients about new pictures, and again about the same, which are kept.

    `share` is that of the time in which some picture was encoded in which a reply streamed.
    `encode_ms` is what a picture takes from its tokens to its embeddings when nothing else runs.
    """

    share: float
    images: int
    new_s: float
    kept_s: float
    encode_ms: float


class VisionFigures(msgspec.Struct, kw_only=True):
    """All figures of a device; `missed` names the aims that were not met.

    Memory is resident in megabytes, daemon and all of its processes (shared memory counts in each
    that has it), and what of the GPU's the process of transformers and the daemon took.
    """

    precision: str
    sizes: dict[str, SizeFigures]
    preprocess_vs_transformers: float | None
    preprocess_vs_torchvision: float | None
    ttft_vs_transformers: dict[str, float]
    cached_ms: float
    cached_p90_ms: float
    text_row_loss: float | None = None
    accuracy: float | None = None
    accuracy_by_group: dict[str, float] = {}
    hidden_share: float | None = None
    text_rows: TextRowFigures | None = None
    beside: BesideFigures | None = None
    hidden: HiddenFigures | None = None
    memory_mb: dict[str, float] = {}
    missed: list[str] = []
    notes: list[str] = []


class Looks(msgspec.Struct):
    """Measurements of one size: through the daemon, and seconds by contender and work."""

    asked: list[Asked] = []
    seconds: dict[str, list[float]] = {}
    token: int | None = None


def size_figures(looks: Looks) -> SizeFigures:
    """Medians, and the ratios to the peers that there are."""
    stages = {
        f"{name}_ms": 1000 * median(getattr(one, name) for one in looks.asked)
        for name in ("tokenize", "decode", "resize", "engine", "hand_over", "queue", "prefill")
    }
    ttft = 1000 * median(one.ttft for one in looks.asked)
    found = {name: 1000 * median(seconds) for name, seconds in looks.seconds.items()}
    patches = found["hearth patches"]
    answer = found.get("transformers first_token")
    theirs, fast = found.get("transformers patches"), found.get("transformers torchvision")
    return SizeFigures(
        tokens=looks.asked[0].tokens,
        **stages,
        ttft_ms=ttft,
        patches_ms=patches,
        transformers_ttft_ms=answer,
        ttft_vs_transformers=_over(answer, ttft),
        transformers_patches_ms=theirs,
        preprocess_vs_transformers=_over(theirs, patches),
        torchvision_patches_ms=fast,
        preprocess_vs_torchvision=_over(fast, patches),
        same_token=None if looks.token is None else looks.asked[-1].token == looks.token,
    )


def ratio_of(sizes: Mapping[str, SizeFigures], name: str) -> float | None:
    """The smallest ratio over all sizes; None where one of them has none."""
    ratios = [getattr(one, name) for one in sizes.values()]
    return None if None in ratios else min(ratios)


def beside_figures(
    alone: Rates, pictures: Rates, both: Rates, *, nice: int, clients: int
) -> BesideFigures:
    """Text alone, pictures alone, and both at once."""
    return BesideFigures(
        encoder_nice=nice,
        clients=clients,
        text_tokens_per_s_alone=alone.tokens_per_s,
        text_tokens_per_s=both.tokens_per_s,
        images_per_s_alone=pictures.images_per_s,
        images_per_s=both.images_per_s,
    )


def hidden_figures(
    encodes: Sequence[Span],
    replies: Sequence[Span],
    *,
    new: Sequence[float],
    kept: Sequence[float],
    encode_s: float,
) -> HiddenFigures:
    """Share of the encoder that hides behind replies; seconds of each pass over the pictures."""
    either = _length([*encodes, *replies])
    encoding, replying = _length(encodes), _length(replies)
    return HiddenFigures(
        share=(encoding + replying - either) / encoding,
        images=len(encodes),
        new_s=median(new),
        kept_s=median(kept),
        encode_ms=1000 * encode_s,
    )


def _length(spans: Sequence[Span]) -> float:
    """Seconds that at least one span covers."""
    total, end = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total


def missed_aims(figures: VisionFigures) -> list[str]:
    """The aims that figures do not meet; what was not measured misses none."""
    ttft = figures.ttft_vs_transformers
    aims = {
        "preprocess_vs_transformers above 1": _above(figures.preprocess_vs_transformers, 1),
        f"ttft_vs_transformers at least 2 at {_TOP}": ttft.get(_TOP, 2) >= 2,  # noqa: PLR2004 - as it says
        f"ttft_vs_transformers above 1 at {_MIDDLE}": _above(ttft.get(_MIDDLE), 1),
        "cached_ms below 2": figures.cached_ms < 2,  # noqa: PLR2004 - as it says
        "accuracy at least 0.9": figures.accuracy is None or figures.accuracy >= 0.9,  # noqa: PLR2004 - likewise
        "text_row_loss at most 0.05": (figures.text_row_loss or 0) <= 0.05,  # noqa: PLR2004 - likewise
    }
    return [name for name, met in aims.items() if not met]


def _above(value: float | None, limit: float) -> bool:
    return value is None or value > limit


def _over(theirs: float | None, ours: float) -> float | None:
    return None if theirs is None else theirs / ours
