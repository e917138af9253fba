"""Raw pixels under ROS's names for their layouts (sensor_msgs/image_encodings)."""

import math
from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.headers import check_size
from hearth.runtime.images import Picture
from hearth.runtime.vision_config import VisionConfig

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


PIXEL_BYTES = {
    "rgb8": 3,
    "bgr8": 3,
    "rgba8": 4,
    "bgra8": 4,
    "mono8": 1,
    "8UC1": 1,
    "8UC3": 3,
    "8UC4": 4,
    "bayer_rggb8": 1,
    "bayer_bggr8": 1,
    "bayer_gbrg8": 1,
    "bayer_grbg8": 1,
    "yuv422": 2,
    "uyvy": 2,
    "yuv422_yuy2": 2,
    "yuyv": 2,
    "nv12": 1,
}
"""Bytes of a pixel in a row; the plane of colours of nv12 comes behind all rows."""
# Where in a pair of pixels the two of luma and the two of colours lie.
_PAIRS = {"yuv422_yuy2": (0, 1), "yuyv": (0, 1), "yuv422": (1, 0), "uyvy": (1, 0)}
_BAYER = {name: name[6:10] for name in PIXEL_BYTES if name.startswith("bayer_")}
# OpenCV's integers for BT.601 with 16 to 235 for luma (color_yuv.simd.hpp), of 20 bits.
_SHIFT = 20
_LUMA = 1220542
_LIGHT = (_LUMA * np.maximum(np.arange(256) - 16, 0) + (1 << _SHIFT - 1)).astype(np.int32)
_RED_V, _GREEN_V, _GREEN_U, _BLUE_U = 1673527, -852492, -409993, 2116026


def raw_size(picture: Picture) -> int:
    """Number of bytes of a raw picture.

    Raises `image_invalid` for a row step that its pixels do not fit, for odd sizes of layouts whose
    pixels share colours, and for a side of one pixel of a Bayer sensor, `image_too_large` for too
    many pixels.
    """
    check_size(picture.width, picture.height)
    if picture.step < picture.width * PIXEL_BYTES[picture.kind]:
        raise HearthError(
            "image_invalid",
            f"a row of {picture.width} pixels of {picture.kind} does not fit {picture.step} bytes",
        )
    halved = picture.kind == "nv12"
    if picture.kind in _BAYER and min(picture.width, picture.height) < 2:  # noqa: PLR2004 # a cell
        raise HearthError("image_invalid", f"{picture.kind} needs 2 x 2 pixels at the least")
    if (halved or picture.kind in _PAIRS) and picture.width % 2:
        raise HearthError("image_invalid", f"{picture.kind} needs an even width")
    if halved and picture.height % 2:
        raise HearthError("image_invalid", f"{picture.kind} needs an even height")
    return picture.step * (picture.height + (picture.height // 2 if halved else 0))


def to_rgb(data: memoryview, picture: Picture) -> NDArray[np.uint8]:
    """The colours [height, width, 3] of a raw picture; a view of `data` where they lie there so.

    nv12 has the plane of colours behind that of luma, with the same row step. YUV is turned into
    RGB as OpenCV does, by BT.601. Raises `image_invalid` when the size does not fit `picture`.
    """
    size = raw_size(picture)
    if len(data) != size:
        raise HearthError("image_invalid", f"the picture has {len(data)} bytes instead of {size}")
    height, width = picture.height, picture.width
    rows = np.frombuffer(data, np.uint8).reshape(-1, picture.step)
    pixels = rows[:height, : width * PIXEL_BYTES[picture.kind]].reshape(height, width, -1)
    match picture.kind:
        case "mono8" | "8UC1":
            return pixels.repeat(3, axis=2)
        case "bgr8" | "bgra8" | "8UC3" | "8UC4":
            return pixels[:, :, 2::-1]
        case "nv12":
            shared = rows[height:, :width].reshape(height // 2, width // 2, 2)
            return _bt601(pixels[:, :, 0], shared[:, :, 0], shared[:, :, 1])
        case kind if kind in _PAIRS:
            luma, colors = _PAIRS[kind]
            pairs = pixels.reshape(height, width // 2, 4)
            return _bt601(pixels[:, :, luma], pairs[:, :, colors], pairs[:, :, colors + 2])
        case kind if kind in _BAYER:
            return _bayer(pixels[:, :, 0], _BAYER[kind])
        case _:
            return pixels[:, :, :3]


def _bayer(raw: NDArray[np.uint8], cell: str) -> NDArray[np.uint8]:
    """[height, width, 3] of a sensor [height, width] whose 2 x 2 pixels have the colours of `cell`.

    A colour that a pixel has not is the mean of those around it, to the next whole number.
    """
    height, width = raw.shape
    pixels = np.empty((height, width, 3), np.uint8)
    # What lies beyond the border is what lies as far inside it, which has the same colour.
    near = np.pad(raw, 1, "reflect")
    for row, column, color in product((0, 1), (0, 1), "rgb"):
        found = pixels[row::2, column::2, "rgb".index(color)]
        if cell[row * 2 + column] == color:
            found[:] = raw[row::2, column::2]
            continue
        total, count = np.zeros(found.shape, np.uint16), 0
        for y, x in product((0, 1, 2), (0, 1, 2)):
            if cell[(row + y + 1) % 2 * 2 + (column + x + 1) % 2] == color:
                total += near[row + y : height + y : 2, column + x : width + x : 2]
                count += 1
        found[:] = (total + count // 2) // count
    return pixels


def _bt601(
    luma: NDArray[np.uint8], u: NDArray[np.uint8], v: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """[height, width, 3] of luma [height, width] and colours that two or four pixels share."""
    down, across = luma.shape[0] // u.shape[0], luma.shape[1] // u.shape[1]
    light = _LIGHT[luma].reshape(u.shape[0], down, -1)
    blue, red = u.astype(np.int32) - 128, v.astype(np.int32) - 128
    pixels = np.empty((*luma.shape, 3), np.uint8)
    shares = (_RED_V * red, _GREEN_V * red + _GREEN_U * blue, _BLUE_U * blue)
    for place, share in enumerate(shares):
        color = light + share.repeat(across, axis=1)[:, np.newaxis]
        color >>= _SHIFT
        pixels[..., place] = color.clip(0, 255, out=color).reshape(luma.shape)
    return pixels
