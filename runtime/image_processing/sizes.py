"""Layout of a picture or a video, by the resize rules of each family's processor."""

import math
from collections.abc import Sequence

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.raw_frames import frames_of
from hearth.runtime.images import ImageLayout, Picture
from hearth.runtime.vision_config import VisionConfig

MOST_ASPECT = 200
"""Greatest ratio of a picture's sides, as the Qwen families have it."""
_LONGEST = 4096
"""The longest edge in pixels of anything that Idefics3 resizes to."""


def layout_of(picture: Picture, config: VisionConfig, most_tokens: int = 0) -> ImageLayout:
    """Compute the layout of a picture, of `most_tokens` embeddings at the most (0: no limit).

    A segment never has more patches than the tower takes at once. Raises `image_invalid` for a
    picture that is too long and narrow, `image_too_large` where the limit leaves too little.
    """
    _check_aspect(picture)
    if config.family == "idefics3":
        return _tiled(picture, config, most_tokens)
    return _merged(picture, config, most_tokens, ())


def video_layout(
    frames: Sequence[Picture],
    times: Sequence[float],
    config: VisionConfig,
    most_tokens: int = 0,
) -> ImageLayout:
    """Compute the layout of a video's frames, taken at `times` in seconds, as `layout_of` does.

    Raises `image_invalid` as well for frames of different sizes, and for times as `rate_of` does.
    """
    used = frames_of(times, config)
    if len(frames) != len(times):
        raise HearthError("image_invalid", "each frame of a video needs its time")
    if len({(frame.width, frame.height) for frame in frames}) > 1:
        raise HearthError("image_invalid", "the frames of a video need one size")
    _check_aspect(frames[0])
    if config.family == "idefics3":
        return _squares(config, most_tokens, used)
    return _merged(frames[0], config, most_tokens, used)


def largest_square(config: VisionConfig) -> int:
    """The side in pixels of the largest square picture that is not made smaller."""
    rules = config.rules
    if config.family == "idefics3":
        return min(rules.longest_edge, _LONGEST) if rules.splits else rules.tile_size
    unit = config.patch_size * config.merge_size
    most = min(rules.max_pixels // unit**2, _most_of_one(config, 0, 1))
    return math.isqrt(most) * unit


def first_size(
    height: int, width: int, layout: ImageLayout, config: VisionConfig
) -> tuple[int, int]:
    """Height and width to which Idefics3 resizes a picture before it makes whole tiles of it."""
    rules = config.rules
    if layout.frames:
        return _longest_size(height, width, min(rules.video_longest_edge, _LONGEST))
    size = _longest_size(height, width, rules.longest_edge)
    tiles = layout.rows or 1, layout.columns or 1
    if rules.splits and _tiles(*size, rules.tile_size) != tiles:
        # A limit has made the layout smaller than the rule has it.
        return _longest_size(height, width, max(layout.height, layout.width))
    return size


def _longest_size(height: int, width: int, longest: int) -> tuple[int, int]:
    """The longer edge becomes `longest`, the other even; then neither is above `_LONGEST`."""
    aspect = width / height
    if width >= height:
        shorter = int(longest / aspect)
        height, width = max(1, shorter + shorter % 2), longest
    else:
        shorter = int(longest * aspect)
        height, width = longest, max(1, shorter + shorter % 2)
    aspect = width / height
    if width >= height and width > _LONGEST:
        return max(1, int(_LONGEST / aspect)), _LONGEST
    if height > width and height > _LONGEST:
        return _LONGEST, max(1, int(_LONGEST * aspect))
    return height, width


def _check_aspect(picture: Picture) -> None:
    long, short = max(picture.width, picture.height), min(picture.width, picture.height)
    if long > short * MOST_ASPECT:
        raise HearthError(
            "image_invalid",
            f"a picture of {picture.width} x {picture.height} pixels is too long and narrow: its "
            f"sides may differ {MOST_ASPECT} times at the most",
        )


def _merged(
    picture: Picture, config: VisionConfig, most_tokens: int, frames: tuple[int, ...]
) -> ImageLayout:
    """The Qwen families: whole merged patches, of all frames together or one by one."""
    unit, depth = config.patch_size * config.merge_size, config.temporal_patch_size
    steps = -(-len(frames) // depth) or 1
    height, width = picture.height, picture.width
    rules = config.rules
    low, high = rules.min_pixels, rules.max_pixels
    counted = rounded = 1
    if frames:
        low, high = rules.video_min_pixels, rules.video_max_pixels
        if config.family == "qwen3_vl":
            if len(frames) < depth:
                raise HearthError("image_invalid", f"a video needs {depth} frames at the least")
            counted, rounded = len(frames), round(len(frames) / depth) * depth
            if min(height, width) < unit:
                scale = max(unit / height, unit / width)
                height, width = int(height * scale), int(width * scale)
    rows, columns = round(height / unit), round(width / unit)
    area = counted * height * width
    if rounded * rows * columns * unit**2 > high:
        rows, columns = _shrunk(height, width, unit, math.sqrt(area / high))
    elif rounded * rows * columns * unit**2 < low:
        scale = math.sqrt(low / area)
        rows, columns = math.ceil(height * scale / unit), math.ceil(width * scale / unit)
    most = _most_of_one(config, most_tokens, steps)
    if rows * columns > most:
        scale = math.sqrt(height * width / (most * unit**2))
        rows, columns = _shrunk(height, width, unit, scale)
        # Of what is very long and narrow one row is left, and it may still be too long.
        columns = min(columns, most)
        rows = min(rows, most // columns)
    grid = steps, rows * config.merge_size, columns * config.merge_size
    return ImageLayout(rows * unit, columns * unit, grid, steps * rows * columns, frames=frames)


def _shrunk(height: int, width: int, unit: int, scale: float) -> tuple[int, int]:
    return (
        max(1, math.floor(height / scale / unit)),
        max(1, math.floor(width / scale / unit)),
    )


def _most_of_one(config: VisionConfig, most_tokens: int, steps: int) -> int:
    """Number of tokens that each of `steps` equal parts may have."""
    largest = config.max_patches // config.merge_size**2
    if not most_tokens:
        return largest
    if most_tokens < steps:
        raise _too_large(most_tokens)
    return min(largest, most_tokens // steps)


def _tiled(picture: Picture, config: VisionConfig, most_tokens: int) -> ImageLayout:
    """Idefics3: tiles of one size and the whole picture behind them, or that alone."""
    one = _squares(config, most_tokens, ())
    if not config.rules.splits:
        return one
    tile = config.rules.tile_size
    longest = config.rules.longest_edge
    while longest > 0:
        rows, columns = _tiles(*_longest_size(picture.height, picture.width, longest), tile)
        segments = rows * columns + 1
        if rows * columns == 1:
            return one
        if not most_tokens or segments * one.tokens <= most_tokens:
            return ImageLayout(
                rows * tile,
                columns * tile,
                one.grid,
                segments * one.tokens,
                segments,
                rows,
                columns,
            )
        longest = (min(longest, _LONGEST) - 1) // tile * tile
    return one


def _tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """Rows and columns of tiles: the longer edge rounded up, then the other in proportion."""
    aspect = width / height
    if width >= height:
        columns = -(-width // tile)
        return max(1, -(-int(columns * tile / aspect) // tile)), columns
    rows = -(-height // tile)
    return rows, max(1, -(-int(rows * tile * aspect) // tile))


def _squares(config: VisionConfig, most_tokens: int, frames: tuple[int, ...]) -> ImageLayout:
    """Idefics3: a picture, or each frame of a video, as one tile."""
    side = config.rules.tile_size
    patches = side // config.patch_size
    count = len(frames) or 1
    tokens = count * (patches // config.merge_size) ** 2
    if most_tokens and tokens > most_tokens:
        raise _too_large(most_tokens)
    return ImageLayout(side, side, (1, patches, patches), tokens, count, frames=frames)


def _too_large(most_tokens: int) -> HearthError:
    return HearthError(
        "image_too_large", f"{most_tokens} tokens, the most of an image here, are too few for it"
    )
