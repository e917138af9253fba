"""Which frames of a video are taken, as the processor of each family samples them."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from runtime.errors import HearthError
from runtime.vision_config import VisionConfig

# A lone frame has no rate; the processors take this one for it.
_RATE = 24.0


def rate_of(times: Sequence[float]) -> float:
    """Frames per second of a video whose frames were taken at `times` in seconds.

    Raises `image_invalid` for no frames, and for times that fall or are all the same.
    """
    if not times or not all(map(math.isfinite, times)):
        raise HearthError("image_invalid", "each frame of a video needs its time in seconds")
    if len(times) == 1:
        return _RATE
    if times[0] == times[-1] or any(later < sooner for sooner, later in pairwise(times)):
        raise HearthError(
            "image_invalid", "the times of a video's frames must not fall, nor all be the same"
        )
    # Whole rates shall stay whole in spite of how times are rounded: samples are cut to integers.
    return round((len(times) - 1) / (times[-1] - times[0]), 6)


def frames_of(times: Sequence[float], config: VisionConfig) -> tuple[int, ...]:
    """The numbers of the frames that are used, all of them where the model does not sample.

    Raises `image_invalid` as `rate_of` does.
    """
    rate, count, rules = rate_of(times), len(times), config.rules
    if not rules.fps:
        return tuple(range(count))
    if config.family == "idefics3":
        return _spread_inside(count, rate, rules.fps, rules.max_frames)
    if config.family == "qwen3_vl":
        wanted = int(count / rate * rules.fps)
        wanted = min(max(wanted, rules.min_frames), rules.max_frames, count)
        return tuple(np.linspace(0, count - 1, wanted).round().astype(int).tolist())
    depth = config.temporal_patch_size
    limit = min(rules.max_frames, count) // depth * depth
    wanted = math.floor(min(max(count / rate * rules.fps, rules.min_frames), limit) / depth) * depth
    if not wanted:
        return tuple(range(count))
    # In 32 bits, as the processor counts: where a step ends on a frame, that decides.
    places = np.arange(0, count, count / wanted).astype(np.float32)
    return tuple(places.astype(int).tolist())


def _spread_inside(count: int, rate: float, fps: float, most: int) -> tuple[int, ...]:
    """Evenly, without the first and last second of a long video."""
    duration = count / rate
    wanted = max(1, min(round(fps * duration), most))
    first, last = 0, count - 1
    if duration - 2 > most * fps:
        first, last = int(rate), min(int(count - rate), count - 1)
        if first >= last:
            first, last = 0, count - 1
    return tuple(np.unique(np.linspace(first, last, wanted, dtype=int)).tolist())
