"""Pixels into the patches that a vision tower takes."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hearth.runtime.image_processing.sizes import first_size
from hearth.runtime.images import ImageLayout
from hearth.runtime.vision_config import VisionConfig

_STRIPS = 4
# Below so many pixels threads cost more than they save.
_LARGE = 1 << 19
_FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "bilinear": Image.Resampling.BILINEAR,
}


def patch(
    image: Image.Image,
    layout: ImageLayout,
    config: VisionConfig,
    out: NDArray[np.uint8],
    *,
    frame: int = 0,
) -> None:
    """Resize a picture in RGB and write its patches to `out` [patches, patch_bytes].

    `out` is contiguous. Pixels are resized as Pillow does it, each step rounded to 8 bits. The
    order is by segments, and in each by the tokens that patches merge into. Of a video this is used
    frame number `frame`, and `out` is the whole's.
    """
    resample = _FILTERS[config.rules.resample]
    side = config.patch_size
    time, rows, columns = layout.grid
    if config.family != "idefics3":
        image = _resized(image, layout.width, layout.height, resample)
        step, half = divmod(frame, config.temporal_patch_size)
        parts = out.reshape(time, rows * columns, 3, config.temporal_patch_size, side, side)
        # A picture, or the last of an odd number of frames, fills its patches by itself.
        last = frame + 1 >= len(layout.frames)
        halves = slice(half, None if last else half + 1)
        _cut(image, config.merge_size, parts[step, :, :, halves])
        return
    height, width = first_size(image.height, image.width, layout, config)
    image = _resized(image, width, height, resample)
    parts = out.reshape(layout.segments, rows * columns, 3, 1, side, side)
    tile = config.rules.tile_size
    if layout.rows:
        image = _resized(image, layout.width, layout.height, resample)
        for place in range(layout.segments - 1):
            top, left = (tile * number for number in divmod(place, layout.columns))
            one = image.crop((left, top, left + tile, top + tile))
            _cut(one, config.merge_size, parts[place])
        frame = -1
    _cut(_resized(image, tile, tile, resample), config.merge_size, parts[frame])


def _resized(
    image: Image.Image, width: int, height: int, resample: Image.Resampling
) -> Image.Image:
    """The image in another size; a large one in strips, side by side in as many threads.

    Pillow looks beyond a strip's box where the filter does, so that strips fit without a seam.
    """
    if image.size == (width, height):
        return image
    count = min(_STRIPS, height) if image.width * image.height >= _LARGE else 1
    if count == 1:
        return image.resize((width, height), resample)
    edges = [height * strip // count for strip in range(count + 1)]
    scale = image.height / height

    def strip(top: int, bottom: int) -> Image.Image:
        box = (0, top * scale, image.width, bottom * scale)
        return image.resize((width, bottom - top), resample, box)

    whole = Image.new(image.mode, (width, height))
    with ThreadPoolExecutor(count) as threads:
        for top, part in zip(edges, threads.map(strip, edges, edges[1:]), strict=False):
            whole.paste(part, (0, top))
    return whole


def _cut(image: Image.Image, merge: int, out: NDArray[np.uint8]) -> None:
    """Patches by blocks of `merge` x `merge`, into [patches, 3, times, side, side].

    Every time gets the same. What is moved is a patch's row of one colour at a time.
    """
    side = out.shape[-1]
    run = np.dtype((np.void, side))
    across, down = image.width // side // merge, image.height // side // merge
    # A tile of SmolVLM2 is no multiple of its patches: what is left over is not seen.
    seen = (across * merge * side, down * merge * side)
    if image.size != seen:
        image = image.crop((0, 0, *seen))
    target = out.view(run).reshape(down, across, merge, merge, *out.shape[1:-1])
    for color, plane in enumerate(image.split()):
        runs = np.asarray(plane).view(run).reshape(down, merge, side, across, merge)
        for time in range(out.shape[2]):
            target[..., color, time, :] = runs.transpose(0, 3, 1, 4, 2)
