"""Headers of picture files, read without decoding any pixels."""

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from hearth.runtime.errors import HearthError
from hearth.runtime.images import FileFormat, Picture

_TAG = 0x0112
_ENTRY = 12
# Kinds of a TIFF field that are whole numbers: byte, short and long, without and with a sign.
_WHOLE = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
UPRIGHT = 1
LAST = 8


def orientation_of(exif: bytes, xmp: bytes = b"") -> int:
    """The orientation from 1 to 8 (EXIF 2.32, 4.6.4), 1 where nothing readable is said of it.

    `exif` is a TIFF structure, with or without the name of the block before it. What XMP says
    counts where EXIF says nothing.
    """
    try:
        found = _exif(exif.removeprefix(b"Exif\0\0"))
    except (struct.error, KeyError):
        found = None
    if found is None and (match := _XMP.search(xmp)):
        found = int(match[1])
    return found if found is not None and UPRIGHT <= found <= LAST else UPRIGHT


def _exif(tiff: bytes) -> int | None:
    order = {b"II*\0": "<", b"MM\0*": ">"}[tiff[:4]]
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    (entries,) = struct.unpack_from(f"{order}H", tiff, start)
    found = None
    # Of a list that is cut off, what is there counts.
    end = min(start + 2 + entries * _ENTRY, len(tiff) - _ENTRY + 1)
    for place in range(start + 2, end, _ENTRY):
        tag, kind, count = struct.unpack_from(f"{order}HHI", tiff, place)
        if tag == _TAG and count == 1 and kind in _WHOLE:
            (found,) = struct.unpack_from(f"{order}{_WHOLE[kind]}", tiff, place + 8)
    return found


MOST_PIXELS = 1 << 26
"""The most pixels of a picture: beyond what cameras deliver, a file is a bomb."""
# How many pieces of a file are looked through; each takes about a microsecond.
_MOST_PARTS = 1 << 13
# Of what is said about orientation, which the first few hundred bytes do.
_MOST_META = 1 << 18
_FIRST_TURNED = 5
_BYTE = 0xFF
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_HUFFMAN = {0xC0, 0xC1, 0xC2}
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
_JPEG_SCAN = 0xDA
_JPEG_APP1 = 0xE1
_JPEG_COLORS = {1, 3, 4}
_JPEG_BITS = 8
_PNG_DEEP = 16
_PNG_GREYS = {0, 4}
_GIF_EXTENSION = 0x21
_GIF_FRAME = 0x2C
_GIF_END = 0x3B
_WEBP_LOSSLESS = 0x2F
_WEBP_SIDE = (1 << 14) - 1


class Header(NamedTuple):
    """Format, size as stored, and the EXIF orientation from 1 to 8, of which 1 is upright.

    `bits` are those of one colour of a pixel as stored.
    """

    kind: FileFormat
    width: int
    height: int
    orientation: int = 1
    bits: int = 8

    @property
    def upright(self) -> Picture:
        """The picture as it is meant to be seen."""
        if self.orientation >= _FIRST_TURNED:
            return Picture(self.kind, self.height, self.width)
        return Picture(self.kind, self.width, self.height)


def read_header(data: memoryview) -> Picture:
    """Format and upright size of a JPEG, PNG, WebP or GIF file.

    Raises `image_invalid` for anything else, for a broken header and for grey of 16 bits,
    `image_too_large` for more than `MOST_PIXELS`.
    """
    return parse_header(data).upright


def parse_header(data: memoryview) -> Header:
    """As `read_header`, but the size as stored, and the orientation."""
    data = data.cast("B")
    start = bytes(data[:12])
    try:
        if start.startswith(b"\xff\xd8\xff"):
            header = _jpeg(data)
        elif start.startswith(b"\x89PNG\r\n\x1a\n"):
            header = _png(data)
        elif start.startswith(b"RIFF") and start.endswith(b"WEBP"):
            header = _webp(data)
        elif start.startswith((b"GIF87a", b"GIF89a")):
            header = _gif(data)
        else:
            raise HearthError("image_invalid", "the picture is no JPEG, PNG, WebP or GIF file")
    except (IndexError, ValueError, struct.error) as error:
        raise HearthError("image_invalid", "the picture's header is broken or cut off") from error
    check_size(header.width, header.height)
    return header


def check_size(width: int, height: int) -> None:
    """Raise `image_invalid` for a picture without pixels, `image_too_large` for one of too many."""
    if width < 1 or height < 1:
        raise HearthError("image_invalid", "the picture has no pixels")
    if width * height > MOST_PIXELS:
        raise HearthError(
            "image_too_large",
            f"the picture has {width} x {height} pixels: {MOST_PIXELS} is the most",
        )


def _jpeg(data: memoryview) -> Header:
    size: tuple[int, int] | None = None
    exif, xmp = b"", b""
    for marker, part in _jpeg_parts(data):
        if marker in _JPEG_FRAMES:
            bits, height, width, colors = struct.unpack_from(">BHHB", part)
            if bits != _JPEG_BITS or colors not in _JPEG_COLORS:
                raise HearthError("image_invalid", "the picture is a JPEG of a rare kind")
            # Huffman codes have a bit at the least, and so has each block of 8 x 8.
            if marker in _JPEG_HUFFMAN and len(data) * 8 < -(-width // 8) * -(-height // 8):
                raise HearthError("image_invalid", "the picture is cut off or not of its size")
            size = width, height
        elif marker == _JPEG_APP1 and bytes(part[:6]) == b"Exif\0\0":
            exif += bytes(part[6 : 6 + _MOST_META - len(exif)])
        elif marker == _JPEG_APP1 and bytes(part[:29]) == b"http://ns.adobe.com/xap/1.0/\0":
            xmp = bytes(part[29:])
    if size is None:
        raise ValueError
    return Header("jpeg", *size, orientation_of(exif, xmp))


def _jpeg_parts(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Markers and what belongs to them, up to the first scan (ITU T.81, B.1.1)."""
    place = 2
    for _ in range(_MOST_PARTS):
        marker = data[place + 1]
        if data[place] != _BYTE or marker == _BYTE:
            place += 1  # filled up, or with something between that decoders pass over
        elif marker in _JPEG_BARE:
            place += 2
        elif marker == _JPEG_SCAN:
            return
        else:
            (length,) = struct.unpack_from(">H", data, place + 2)
            yield marker, _piece(data, place + 4, length - 2)
            place += 2 + length
    raise ValueError


def _png(data: memoryview) -> Header:
    width, height, bits, colors = struct.unpack_from(">IIBB", _piece(data, 16, 13))
    if bytes(data[12:16]) != b"IHDR":
        raise ValueError
    if bits == _PNG_DEEP and colors in _PNG_GREYS:
        # What measures depth would be seen as a white sheet: readers cut it off at 255.
        raise HearthError(
            "image_invalid",
            "the picture is grey of 16 bits a pixel, as depth cameras have it: scale it to 8",
        )
    exif, xmp = b"", b""
    for name, part in _chunks(data, 8, png=True):
        if name == b"eXIf":
            exif = bytes(part[:_MOST_META])
        elif name == b"iTXt" and bytes(part[:20]) == b"XML:com.adobe.xmp\0\0\0":
            xmp = bytes(part[20:_MOST_META])
        elif name == b"IEND":
            break
    return Header("png", width, height, orientation_of(exif, xmp), bits)


def _webp(data: memoryview) -> Header:
    (size,) = struct.unpack_from("<I", data, 4)
    parts: dict[bytes, memoryview] = {}
    for name, part in _chunks(data[: 8 + size], 12, png=False):
        parts.setdefault(name, part)
    kind = next(iter(parts), b"")
    first = parts.get(kind, data[:0])
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(_piece(first, at, 3), "little") for at in (4, 7))
        meta = (bytes(parts.get(name, b"")[:_MOST_META]) for name in (b"EXIF", b"XMP "))
        return Header("webp", width, height, orientation_of(*meta))
    if kind == b"VP8L" and first[0] == _WEBP_LOSSLESS:
        (bits,) = struct.unpack_from("<I", first, 1)
        return Header("webp", 1 + (bits & _WEBP_SIDE), 1 + (bits >> 14 & _WEBP_SIDE))
    if kind == b"VP8 " and bytes(first[3:6]) == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", first, 6)
        return Header("webp", width & _WEBP_SIDE, height & _WEBP_SIDE)
    raise ValueError


def _chunks(data: memoryview, place: int, *, png: bool) -> Iterator[tuple[bytes, memoryview]]:
    """Names and contents of chunks; the last may be cut off, which the decoder will find.

    A PNG has length and name before each and a checksum behind it, a RIFF name and length, and
    fills up to an even place.
    """
    for _ in range(_MOST_PARTS):
        if place + 8 > len(data):
            return
        name, size = bytes(data[place : place + 4]), data[place + 4 : place + 8]
        if png:
            name, size = bytes(size), data[place : place + 4]
        length = int.from_bytes(size, "big" if png else "little")
        yield name, data[place + 8 : place + 8 + length]
        place += 8 + length + (4 if png else length % 2)
    raise ValueError


def _gif(data: memoryview) -> Header:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    inside = False
    for _ in range(_MOST_PARTS):
        if inside:
            # A piece of an extension; an empty one ends it.
            inside = data[place] > 0
            place += 1 + data[place]
        elif data[place] == _GIF_FRAME:
            # The screen is widened for a frame that goes beyond it.
            x, y, columns, rows = struct.unpack_from("<HHHH", data, place + 1)
            return Header("gif", max(width, x + columns), max(height, y + rows))
        elif data[place] == _GIF_END:
            break
        else:
            inside = data[place] == _GIF_EXTENSION
            place += 2 if inside else 1
    raise ValueError


def _piece(data: memoryview, start: int, length: int) -> memoryview:
    """A part that has to be there as a whole."""
    if length < 0 or start + length > len(data):
        raise ValueError
    return data[start : start + length]
