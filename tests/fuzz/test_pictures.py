"""Files of pictures that are nearly right become pixels or a named error, and nothing else."""

import zlib
from collections import Counter
from random import Random
from typing import Any, get_args

import pytest
from PIL import Image

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing import headers
from hearth.runtime.image_processing.decoding import decode
from hearth.runtime.image_processing.headers import read_header
from hearth.runtime.image_processing.raw_frames import raw_size
from hearth.runtime.images import Picture, RawEncoding
from tests.runtime.image_processing.photographs import draw, file_of, with_xmp

MUTATIONS = 20_000
_PHOTO = Image.fromarray(draw(23, 17))
_TURNED = Image.Exif()
_TURNED[0x0112] = 6
_FRAMES: dict[str, Any] = {"save_all": True, "append_images": [_PHOTO.rotate(20)]}
_FILES = {
    "jpeg": file_of(_PHOTO, "jpeg", exif=_TURNED, comment=b"mind"),
    "progressive": with_xmp(
        file_of(_PHOTO, "jpeg", progressive=True), b'<a tiff:Orientation="8"/>'
    ),
    "cmyk": file_of(_PHOTO.convert("CMYK"), "jpeg"),
    "png": file_of(_PHOTO, "png", exif=_TURNED),
    "palette": file_of(_PHOTO.quantize(9), "png", transparency=b"\0\1\2"),
    "alpha": file_of(_PHOTO.convert("LA"), "png"),
    "frames": file_of(_PHOTO, "png", **_FRAMES),
    "webp": file_of(_PHOTO, "webp", exif=_TURNED),
    "lossless": file_of(_PHOTO, "webp", lossless=True),
    "moving": file_of(_PHOTO, "webp", **_FRAMES),
    "gif": file_of(_PHOTO.quantize(30), "gif", comment=b"mind", transparency=3),
    "animated": file_of(_PHOTO, "gif", **_FRAMES),
}
_PIECES = (
    *(
        b"\xff\xd8\xff",
        b"\xff\xc0",
        b"\xff\xda",
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\x7f\xff\xff\xff",
    ),
    *(b"IDAT", b"eXIf", b"VP8X", b"ALPH", b"ANMF", b"\x21\xf9\x04", b"\x2c", b"\x3b"),
)
_NAMED = {"image_invalid", "image_too_large"}


def damaged(data: bytes, random: Random) -> bytes:
    """Half of the damage is in the first bytes, where the headers are."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        place = random.randrange(random.choice((60, len(changed))) if len(changed) > 60 else 60)
        piece = random.choice(_PIECES)
        match random.randrange(6):
            case 0:
                del changed[place : place + random.choice((1, 4, 300))]
            case 1:
                changed[place:place] = piece
            case 2:
                changed[place : place + len(piece)] = piece
            case 3:
                changed += changed[place : place + 50]
            case _:
                changed[place : place + 1] = bytes([random.randrange(256)])
    if changed.startswith(b"\x89PNG") and random.random() < 0.7:
        mend_checksums(changed)
    return bytes(changed)


def mend_checksums(data: bytearray) -> None:
    """So that a PNG's damage is found by what reads the chunk, and not by its sum."""
    place = 8
    while place + 12 <= len(data):
        end = place + 8 + int.from_bytes(data[place : place + 4], "big")
        data[end : end + 4] = zlib.crc32(data[place + 4 : end]).to_bytes(4, "big")
        place = end + 4


@pytest.mark.parametrize("name", _FILES)
def test_damaged_files_are_pixels_or_a_named_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is larger is refused all the same, and costs no time here.
    monkeypatch.setattr(headers, "MOST_PIXELS", 1 << 16)
    random, met = Random(name), Counter[tuple[str, str]]()
    for _ in range(-(-MUTATIONS // len(_FILES))):
        view = memoryview(damaged(_FILES[name], random))
        try:
            picture = read_header(view)
            assert decode(view, picture).size == (picture.width, picture.height)
        except HearthError as error:
            met[error.code, error.message] += 1
        else:
            met["pixels", ""] += 1
    assert {code for code, _ in met} - {"pixels"} <= _NAMED
    assert met["pixels", ""]
    assert len(met) > 3


def test_odd_raw_pictures_are_pixels_or_a_named_error() -> None:
    random = Random(5)
    kinds = get_args(RawEncoding)
    codes = set()
    odd = (-1, 0, 1, 2, 3, 7, 8, 1 << 20, 1 << 63)
    for _ in range(3_000):
        sizes = [random.choice(odd) for _ in range(3)]
        picture = Picture(random.choice(kinds), *sizes)
        try:
            size = raw_size(picture)
            if size < 1 << 20:
                view = memoryview(bytes(max(0, size + random.choice((0, 0, -1, 1)))))
                assert decode(view, picture).size == (picture.width, picture.height)
        except HearthError as error:
            codes.add(error.code)
    assert codes == _NAMED
