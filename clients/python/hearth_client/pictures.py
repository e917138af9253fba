"""Pictures and videos of a conversation, as frames and what a message says of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hearth_client.errors import ImageInvalid, InvalidValue
from hearth_client.protocol import FileFormat, RawEncoding

if TYPE_CHECKING:
    from typing_extensions import Buffer

_HEAD = 12
_CHANNELS = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1, "yuv422_yuy2": 2, "nv12": 1}
_MODES: dict[str, RawEncoding] = {"RGB": "rgb8", "RGBA": "rgba8", "L": "mono8"}


class PillowImage(Protocol):
    """What is used of an image of Pillow's."""

    mode: str
    size: tuple[int, int]

    def tobytes(self) -> bytes:
        """The pixels, row by row."""

    def convert(self, mode: str) -> PillowImage:
        """The same picture in another mode."""


Source: TypeAlias = "str | os.PathLike[str] | PillowImage | Buffer"
Frame: TypeAlias = bytes | memoryview


class Image:
    """A picture: a file's path or its bytes, an array of pixels, or an image of Pillow's.

    An array is anything with the buffer protocol and 8 bits a value, [height, width, channels] (or
    [height, width] of mono8; [height * 3 / 2, width] of nv12), and needs its `encoding`. Raises
    ImageInvalid for what is none of these; a path's file is read here.
    """

    def __init__(self, source: Source, encoding: RawEncoding | None = None) -> None:
        self.frame, self.says = _taken(source, encoding)


class Video:
    """Pictures in order, and the time of each in seconds."""

    def __init__(self, images: Sequence[Image | Source], times: Sequence[float]) -> None:
        if len(images) != len(times):
            raise InvalidValue(f"{len(images)} pictures have {len(times)} times", "times")
        self.images = [one if isinstance(one, Image) else Image(one) for one in images]
        self.times = list(times)


def _taken(source: Any, encoding: RawEncoding | None) -> tuple[Frame, dict[str, Any]]:
    """The frame of a picture, and the fields that say what it is."""
    if isinstance(source, (str, os.PathLike)):
        source = Path(source).read_bytes()
    if isinstance(source, bytes) and encoding is None:
        return source, {"format": _format_of(source)}
    if hasattr(source, "convert") and encoding is None:
        image = source if source.mode in _MODES else source.convert("RGB")
        width, height = image.size
        says = {"encoding": _MODES[image.mode], "width": width, "height": height}
        return image.tobytes(), says
    return _pixels(source, encoding)


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


def _pixels(array: Any, encoding: RawEncoding | None) -> tuple[Frame, dict[str, Any]]:
    try:
        view = memoryview(array)
    except TypeError:
        text = "a picture is a path, the bytes of a file, an array, or an image of Pillow's"
        raise ImageInvalid(text) from None
    if encoding not in _CHANNELS:
        names = ", ".join(_CHANNELS)
        raise InvalidValue(f"an array needs its encoding: one of {names}", "encoding")
    channels = _CHANNELS[encoding]
    shape = view.shape or ()
    flat = channels == 1 and len(shape) == 2  # noqa: PLR2004 # height and width
    unsigned = view.format[-1:] in {"B", "c"}
    if not unsigned or 0 in shape or not (flat or shape[2:] == (channels,)):
        text = f"{encoding} needs unsigned 8 bit values [height, width, {channels}]"
        raise ImageInvalid(text, "encoding")
    height, width = shape[:2]
    if encoding == "nv12":
        height = height * 2 // 3
    frame = view.cast("B") if view.c_contiguous else view.tobytes()
    return frame, {"encoding": encoding, "width": width, "height": height}
