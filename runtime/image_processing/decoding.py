"""Files of pictures into pixels, by Pillow, and these into patches."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.headers import Header, parse_header
from hearth.runtime.image_processing.raw_frames import to_rgb
from hearth.runtime.image_processing.sizes import first_size
from hearth.runtime.images import ImageLayout, Picture
from hearth.runtime.vision_config import VisionConfig

# Named one by one: Pillow would try dozens of formats, and for WebP load all of them.
_READERS: dict[str, type[ImageFile.ImageFile]] = {
    "jpeg": JpegImagePlugin.JpegImageFile,
    "png": PngImagePlugin.PngImageFile,
    "webp": WebPImagePlugin.WebPImageFile,
    "gif": GifImagePlugin.GifImageFile,
}
_WITH_ALPHA = {"LA", "PA", "RGBA"}
# Pixels that are laid on white at once.
_STRIP = 1 << 20
# By EXIF's orientation from 2 on.
_TURNS = (
    Image.Transpose.FLIP_LEFT_RIGHT,
    Image.Transpose.ROTATE_180,
    Image.Transpose.FLIP_TOP_BOTTOM,
    Image.Transpose.TRANSPOSE,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.ROTATE_90,
)


def decode(data: memoryview, picture: Picture) -> Image.Image:
    """The upright picture in RGB of a file, or of raw pixels, that `picture` describes.

    A file is treated as by the processors of transformers: turned by its orientation, laid on white
    where it is transparent, and made RGB by Pillow; a GIF is its first frame. Raises
    `image_invalid` for what cannot be decoded or is not what its header says, `image_too_large`
    where memory does not do.
    """
    if picture.kind not in _READERS:
        return Image.fromarray(to_rgb(data, picture))
    header = parse_header(data)
    if header.upright != picture:
        raise HearthError("image_invalid", "the picture is not what was announced")
    try:
        # What Pillow says of odd files would go to the log once for each.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _upright(_READERS[header.kind](BytesIO(data)), header)
    except HearthError:
        raise
    except MemoryError as error:
        raise HearthError(
            "image_too_large", "the picture needs more memory than decoding may take"
        ) from error
    except Exception as error:  # a decoder may raise anything for what is not a picture
        raise HearthError("image_invalid", "the picture is broken or cut off") from error


def _upright(image: Image.Image, header: Header) -> Image.Image:
    if image.size != (header.width, header.height):
        raise HearthError("image_invalid", "the picture is not of the size in its header")
    image.load()
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        image = _on_white(image, header)
    elif image.mode != "RGB":
        image = image.convert("RGB")
    if header.orientation > 1:
        image = image.transpose(_TURNS[header.orientation - 2])
    return image


def _on_white(image: Image.Image, header: Header) -> Image.Image:
    """RGB of what is transparent; piece by piece, as each step has a copy of the pixels."""
    hidden = image.info.get("transparency")
    if header.kind == "png" and image.mode == "L" and isinstance(hidden, int):
        image.info["transparency"] = hidden * (255 // ((1 << header.bits) - 1))
    elif isinstance(hidden, tuple):
        # Pillow keeps a transparent colour as the file has it, and 8 bits of each pixel.
        image.info["transparency"] = tuple(value >> header.bits - 8 for value in hidden)
    laid = Image.new("RGB", image.size)
    rows = max(1, _STRIP // image.width)
    for top in range(0, image.height, rows):
        part = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        white = Image.new("RGBA", part.size, (255, 255, 255))
        laid.paste(Image.alpha_composite(white, part).convert("RGB"), (0, top))
    return laid


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
