"""Files of pictures into pixels, by Pillow."""

import warnings
from io import BytesIO

from PIL import GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.headers import Header, parse_header
from hearth.runtime.image_processing.raw_frames import to_rgb
from hearth.runtime.images import Picture

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
