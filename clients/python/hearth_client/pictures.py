"""Pictures and videos of a conversation, as frames and what a message says of them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hearth_client.errors import ImageInvalid, InvalidValue
from hearth_client.protocol import FileFormat, RawEncoding

if TYPE_CHECKING:
    from typing_extensions import Buffer

_HEAD = 12
# Bytes of a pixel in a row.
_CHANNELS: dict[str, int] = {
    **dict.fromkeys(("mono8", "8UC1", "nv12"), 1),
    **dict.fromkeys(("bayer_rggb8", "bayer_bggr8", "bayer_gbrg8", "bayer_grbg8"), 1),
    **dict.fromkeys(("yuv422", "uyvy", "yuv422_yuy2", "yuyv"), 2),
    **dict.fromkeys(("rgb8", "bgr8", "8UC3"), 3),
    **dict.fromkeys(("rgba8", "bgra8", "8UC4"), 4),
}
# ROS's names end with the bits of a value, or have them before a letter for its kind.
_WIDE = re.compile(r"(16|32|64)([USF]C\d+)?$")
_MODES: dict[str, RawEncoding] = {"RGB": "rgb8", "RGBX": "rgba8", "L": "mono8"}
_WITH_ALPHA = {"LA", "PA", "RGBA"}
_WHITE = (255, 255, 255, 255)


class PillowImage(Protocol):
    """Interface that is used of an image of Pillow's."""

    @property
    def mode(self) -> str:
        """The name of its pixels' form."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""

    @property
    def info(self) -> dict[Any, Any]:
        """Further metadata of the file."""

    def tobytes(self) -> bytes:
        """The pixels, row by row."""

    def convert(self, mode: str) -> Any:
        """The same picture in another mode."""


class ArrayLike(Protocol):
    """An array of NumPy's, which type checkers take for no buffer before Python 3.12."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Address and layout of its numbers."""


Source: TypeAlias = "str | os.PathLike[str] | PillowImage | ArrayLike | Buffer"
Frame: TypeAlias = bytes | memoryview


class Image:
    """A picture: a file's path or its bytes, raw pixels, or an image of Pillow's.

    Raw pixels are anything with the buffer protocol and 8 bits a value, and need their `encoding`
    by ROS's name for it: an array [height, width, channels] ([height, width] where that is 1,
    [height * 3 / 2, width] of nv12), or flat bytes with `width`, `height` and, where bytes lie
    between rows, `step` in bytes, as `sensor_msgs/Image` has them. Raises ImageInvalid or
    InvalidValue for what is none of these; a path's file is read here.
    """

    def __init__(
        self,
        source: Source,
        encoding: RawEncoding | str | None = None,
        *,
        width: int | None = None,
        height: int | None = None,
        step: int | None = None,
    ) -> None:
        self.frame: Frame
        self.says: dict[str, Any]
        told = {"width": width, "height": height, "step": step}
        self.frame, self.says = _taken(
            source,
            encoding,
            {name: _whole(name, one) for name, one in told.items() if one is not None},
        )


class Video:
    """Pictures in order, and the time of each in seconds."""

    def __init__(self, images: Sequence[Image | Source], times: Sequence[float]) -> None:
        if len(images) != len(times):
            raise InvalidValue(f"{len(images)} pictures have {len(times)} times", "times")
        self.images: list[Image] = [one if isinstance(one, Image) else Image(one) for one in images]
        self.times: list[float] = list(times)


def _whole(name: str, value: Any) -> int:
    """A whole number of any type, as NumPy has some of its own."""
    try:
        return index(value)
    except TypeError:
        raise InvalidValue(f"{name} must be a whole number", name) from None


def _taken(source: Any, encoding: str | None, told: dict[str, int]) -> tuple[Frame, dict[str, Any]]:
    """The frame of a picture, and the fields that say what it is."""
    if isinstance(source, (str, os.PathLike)):
        source = Path(source).read_bytes()
    if encoding is not None or not (isinstance(source, bytes) or hasattr(source, "convert")):
        return _pixels(source, encoding, told)
    for name in told:
        raise InvalidValue(f"{name} is for raw pixels, which have an encoding", name)
    if isinstance(source, bytes):
        return source, {"format": _format_of(source)}
    return _of_pillow(source)


def _of_pillow(image: Any) -> tuple[Frame, dict[str, Any]]:
    if image.mode.startswith(("I", "F")):
        raise ImageInvalid(
            f"a value of an image of mode {image.mode} has not 8 bits: scale it to 8"
        )
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        # As the daemon does with files.
        over = image.convert("RGBA")
        image = over.copy()
        image.paste(_WHITE, (0, 0, *over.size))
        image.alpha_composite(over)
    if image.mode not in _MODES:
        image = image.convert("RGB")
    width, height = image.size
    return image.tobytes(), {"encoding": _MODES[image.mode], "width": width, "height": height}


def _format_of(data: bytes) -> FileFormat:
    head = data[:_HEAD]
    if head.startswith(b"\xff\xd8"):
        return "jpeg"
    if head.startswith(b"\x89PNG"):
        return "png"
    if head[:4] == b"RIFF" and head[8:] == b"WEBP":
        return "webp"
    if head.startswith(b"GIF8"):
        return "gif"
    raise ImageInvalid("this is no JPEG, PNG, WebP or GIF file: give raw pixels their encoding")


def _pixels(array: Any, encoding: str | None, told: dict[str, int]) -> tuple[Frame, dict[str, Any]]:
    try:
        view = memoryview(array)
    except TypeError:
        text = "a picture is a path, the bytes of a file, raw pixels, or an image of Pillow's"
        raise ImageInvalid(text) from None
    if encoding not in _CHANNELS:
        raise InvalidValue(_no_encoding(encoding), "encoding")
    shape = view.shape or ()
    if view.format[-1:] not in {"B", "c"} or 0 in shape or not shape:
        raise ImageInvalid(f"{encoding} needs unsigned 8 bit values, and some", "encoding")
    size = _size_of(shape, encoding) if not told else _declared_size(view.nbytes, encoding, told)
    frame = view.cast("B") if view.c_contiguous else view.tobytes()
    return frame, {"encoding": encoding, **size}


def _no_encoding(encoding: str | None) -> str:
    names = ", ".join(_CHANNELS)
    if encoding is None:
        return f"raw pixels need their encoding: one of {names}"
    if _WIDE.search(encoding):
        return (
            f"{encoding} has more than 8 bits a value, as depth images have: scale the values to 8 "
            "bits and send them as mono8"
        )
    return f"there is no encoding {encoding}: it is one of {names}"


def _size_of(shape: Sequence[int], encoding: str) -> dict[str, int]:
    """Width and height of an array."""
    channels = _CHANNELS[encoding]
    if not (channels == 1 and len(shape) == 2) and shape[2:] != (channels,):  # noqa: PLR2004 # height and width
        flat = ", or width and height beside flat ones" if len(shape) == 1 else ""
        text = f"{encoding} needs values [height, width, {channels}]{flat}"
        raise ImageInvalid(text, "encoding")
    height, width = shape[:2]
    return {"width": width, "height": height * 2 // 3 if encoding == "nv12" else height}


def _declared_size(size: int, encoding: str, told: dict[str, int]) -> dict[str, int]:
    """Width, height, and the step where it is more than the pixels of a row."""
    for name in ("width", "height"):
        if told.get(name, 0) < 1:
            raise InvalidValue(f"raw pixels of a told size need a {name} from 1", name)
    width, height = told["width"], told["height"]
    row = width * _CHANNELS[encoding]
    step = told.get("step", row)
    if step < row:
        text = f"step is {step}: a row of {width} pixels of {encoding} has {row} bytes"
        raise InvalidValue(text, "step")
    rows = height + height // 2 if encoding == "nv12" else height
    if step * rows != size:
        text = f"these are {size} bytes: {rows} rows of {step} bytes would be {step * rows}"
        raise ImageInvalid(text, "step" if "step" in told else "height")
    return {"width": width, "height": height} | ({"step": step} if step > row else {})
