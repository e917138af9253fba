import zlib
from struct import pack
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing import headers
from hearth.runtime.image_processing.headers import MOST_PIXELS, parse_header, read_header
from hearth.runtime.images import Picture
from tests.runtime.image_processing.photographs import draw, file_of, with_xmp

PIXELS = draw(37, 21)


def refusal(data: bytes) -> str:
    with pytest.raises(HearthError) as caught:
        read_header(memoryview(data))
    return caught.value.code


def png_chunk(name: bytes, content: bytes) -> bytes:
    return pack(">I", len(content)) + name + content + pack(">I", zlib.crc32(name + content))


def bomb(width: int, height: int) -> bytes:
    head = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return head + png_chunk(b"IDAT", zlib.compress(bytes(1 << 20), 9)) + png_chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("jpeg", {}),
        ("jpeg", {"progressive": True, "comment": b"\xff\xc0 none"}),
        ("png", {}),
        ("webp", {}),
        ("webp", {"lossless": True}),
        ("webp", {"exif": b"Exif\0\0none"}),
        ("gif", {}),
        (
            "gif",
            {"comment": b"x" * 600, "save_all": True, "append_images": [Image.new("L", (9, 9))]},
        ),
    ],
)
def test_size_and_format_are_read(kind: Any, options: dict[str, Any]) -> None:
    data = file_of(PIXELS, kind, **options)
    assert read_header(memoryview(data)) == Picture(kind, 37, 21)


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(10))
def test_the_size_is_that_of_the_upright_picture(kind: Any, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(PIXELS, kind, exif=exif)
    header = parse_header(memoryview(data))
    assert header[1:4] == (37, 21, orientation if 1 <= orientation <= 8 else 1)
    turned = orientation in {5, 6, 7, 8}
    assert header.upright == Picture(kind, *((21, 37) if turned else (37, 21)))


def test_xmp_says_where_exif_does_not() -> None:
    xmp = b'<rdf:Description tiff:Orientation="6"/>'
    exif = Image.Exif()
    exif[0x0112] = 1
    for data, orientation in (
        (with_xmp(file_of(PIXELS, "jpeg"), xmp), 6),
        (with_xmp(file_of(PIXELS, "jpeg", exif=exif), xmp), 1),
        (file_of(PIXELS, "webp", xmp=xmp), 6),
        (file_of(PIXELS, "webp", xmp=xmp, exif=exif), 1),
    ):
        assert parse_header(memoryview(data)).orientation == orientation


def test_a_frame_beyond_its_screen_widens_a_gif() -> None:
    data = bytearray(file_of(PIXELS, "gif"))
    data[6:10] = pack("<HH", 5, 30)
    assert read_header(memoryview(data)) == Picture("gif", 37, 30)


def test_too_many_pixels_are_refused() -> None:
    data = bomb(10_000, 10_000)
    assert len(data) < 50_000
    assert refusal(data) == "image_too_large"
    side = 1 << 13
    assert side * side == MOST_PIXELS
    assert read_header(memoryview(bomb(side, side))) == Picture("png", side, side)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_a_picture_has_pixels(size: tuple[int, int]) -> None:
    assert refusal(bomb(*size)) == "image_invalid"


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "gif"])
def test_what_is_cut_off_in_its_header_is_refused(kind: str) -> None:
    data = file_of(PIXELS, kind)
    assert {refusal(data[:length]) for length in range(13)} == {"image_invalid"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"BM" + bytes(60),
        b"<svg width='3'/>",
        b"\xff\xd8\xff\xe0\0\0" + bytes(40),
        b"\xff\xd8" + b"\xff\x01" * 100_000,
        b"GIF89a" + bytes(7) + b"!\xfe" * 9,
        b"RIFF\xff\xff\xff\x7fWEBPVP8X" + bytes(9),
        b"RIFF\xff\xff\xff\x7fWEBPJUNK" + bytes(90),
    ],
)
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    assert refusal(data) == "image_invalid"


def test_no_file_is_looked_through_for_long() -> None:
    many = [
        b"\xff\xd8\xff" + b"\xfe\0\x02\xff" * (1 << 17),
        bomb(5, 5)[:-12] + png_chunk(b"teXt", b"") * (1 << 17),
        b"RIFF\xff\xff\xff\x7fWEBP" + b"ABCD\0\0\0\0" * (1 << 17),
        b"GIF89a\x05\0\x05\0\0\0\0" + b"!\xfe\0" * (1 << 17),
    ]
    assert {refusal(data) for data in many} == {"image_invalid"}


def test_the_file_is_not_changed_or_kept() -> None:
    data = bytearray(file_of(np.zeros((4, 4, 3), np.uint8), "png"))
    read_header(memoryview(data))
    data.clear()


def test_what_is_looked_through_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def count(exif: bytes, xmp: bytes = b"") -> int:
        looked.append(len(exif) + len(xmp))
        return 1

    monkeypatch.setattr(headers, "orientation_of", count)
    frame = b"\xff\xc0" + pack(">HBHHBBBB", 11, 8, 2, 3, 1, 1, 17, 0) + b"\xff\xda"
    exif = b"\xff\xe1\xff\xff" + b"Exif\0\0".ljust(65533, b"x")
    assert read_header(memoryview(b"\xff\xd8" + 20 * exif + frame)) == Picture("jpeg", 3, 2)
    long = png_chunk(b"eXIf", bytes(1 << 20))
    png = file_of(PIXELS, "png")
    read_header(memoryview(png[:33] + long + png[33:]))
    assert max(looked) == 1 << 18
    pieces = b"GIF89a" + pack("<HHBBB", 3, 2, 0, 0, 0) + b"!\xfe" + b"\1x" * 10_000 + b"\0"
    assert refusal(pieces + b"," + pack("<HHHH", 0, 0, 3, 2)) == "image_invalid"
