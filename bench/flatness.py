"""The rule by which `bench soak` calls memory flat."""

from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

WARM_UP_SHARE = 0.2
"""The first fifth of a run fills pools and caches and is not judged."""
MB_PER_10000_REQUESTS = 1.0
_HANDLES_SLACK = 2
_ENOUGH_SAMPLES = 5


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon and its executor at one moment."""

    seconds: float
    requests: int
    rss_bytes: int
    handles: int


class SoakFigures(msgspec.Struct, kw_only=True):
    """Growth after the warm-up; slopes by least squares, megabytes of 10^6 bytes."""

    requests: int
    aborted: int
    failed: int
    minutes: float
    rss_mb: float
    mb_per_minute: float
    mb_per_10000_requests: float
    handles: int
    handles_growth: float
    flat: bool


def judge(samples: Sequence[Sample], *, aborted: int = 0, failed: int = 0) -> SoakFigures:
    """Flat means: no failure, growth below 1 MB per 10,000 requests, no handles left open.

    Handles are compared as medians of the first and the last third after the warm-up, with a
    slack of two. Fewer than five samples after the warm-up are not flat; there is at least one.
    """
    last = samples[-1]
    judged = [one for one in samples if one.seconds >= WARM_UP_SHARE * last.seconds]
    rss = [one.rss_bytes / 1e6 for one in judged]
    per_request = _slope([one.requests for one in judged], rss)
    third = max(1, len(judged) // 3)
    growth = median(one.handles for one in judged[-third:]) - median(
        one.handles for one in judged[:third]
    )
    calm = 10_000 * per_request < MB_PER_10000_REQUESTS and growth <= _HANDLES_SLACK
    return SoakFigures(
        requests=last.requests,
        aborted=aborted,
        failed=failed,
        minutes=last.seconds / 60,
        rss_mb=last.rss_bytes / 1e6,
        mb_per_minute=60 * _slope([one.seconds for one in judged], rss),
        mb_per_10000_requests=10_000 * per_request,
        handles=last.handles,
        handles_growth=growth,
        flat=calm and not failed and len(judged) >= _ENOUGH_SAMPLES,
    )


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    spread = np.asarray(x, dtype=float) - np.mean(x)
    square = float(spread @ spread)
    return float(spread @ np.asarray(y)) / square if square else 0.0
