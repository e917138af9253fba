"""A picture on its way into a prompt: its header, its layout, and the place of its embeddings."""

from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta
from numpy.typing import NDArray

FileFormat = Literal["jpeg", "png", "webp", "gif"]
RawEncoding = Literal[
    "rgb8",
    "bgr8",
    "rgba8",
    "bgra8",
    "mono8",
    "8UC1",
    "8UC3",
    "8UC4",
    "bayer_rggb8",
    "bayer_bggr8",
    "bayer_gbrg8",
    "bayer_grbg8",
    "yuv422",
    "uyvy",
    "yuv422_yuy2",
    "yuyv",
    "nv12",
]
"""Layouts of raw pixels, by the names that ROS has for them."""


DECODING = 2
"""Version of decoding, part of keys: raised when the same bytes become other pixels."""


class Picture(msgspec.Struct, frozen=True, array_like=True):
    """Header of a picture: a file's format or a raw layout, and its size in pixels.

    Width and height are those of the upright picture, after a file's orientation. `step` counts
    the bytes from one row of raw pixels to the next; it is 0 for a file.
    """

    kind: FileFormat | RawEncoding
    width: Annotated[int, Meta(ge=1)]
    height: Annotated[int, Meta(ge=1)]
    step: int = 0


class ImageLayout(msgspec.Struct, frozen=True, array_like=True):
    """Layout of a picture, or a video, for a vision encoder; it follows from sizes alone.

    Resized to `height` x `width` pixels, as one segment, or as `rows` x `columns` tiles and the
    whole picture behind them. `grid` counts the patches of a segment in time, height and width;
    `tokens` the embeddings of all `segments`. `frames` are the numbers of the frames of a video
    that are used.
    """

    height: int
    width: int
    grid: tuple[int, int, int]
    tokens: int
    segments: int = 1
    rows: int = 0
    columns: int = 0
    frames: tuple[int, ...] = ()

    @property
    def patches(self) -> int:
        """Patches of all segments."""
        time, height, width = self.grid
        return self.segments * time * height * width


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a memory that several processes may see; `generation` tells its owners apart."""

    offset: int
    size: int
    generation: int


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `start` to `start + length - 1` of a prompt are an image's embeddings from `first` on.

    `grid` counts them in time, height and width where they have 3-D positions, and `interval` is
    what one step in time adds to a position; a grid of zeros means that they are counted as text.
    """

    start: int
    length: int
    first: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)
    interval: float = 1.0


class EmbeddedImage(msgspec.Struct, frozen=True, array_like=True):
    """An image of a row: where its embeddings lie, how many, and their places in the prompt.

    `key` is the same for equal embeddings; b"" for an image that is shared with no other.
    """

    slot: Slot
    tokens: int
    spans: tuple[ImageSpan, ...]
    key: bytes = b""


class EmbeddingStore(Protocol):
    """Store of the embeddings of the images of rows."""

    def read(self, image: EmbeddedImage) -> NDArray[Any]:
        """[1 + deepstack features, tokens, H] in the engine's type: merged embeddings come first.

        It is a view where possible. Raises `internal` for a slot that is not its image's any more.
        """
