from io import BytesIO
from struct import pack
from typing import Any
from zlib import compress, crc32

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing import decoding
from hearth.runtime.image_processing.decoding import decode
from hearth.runtime.image_processing.headers import read_header
from hearth.runtime.images import Picture
from tests.runtime.image_processing.photographs import draw, file_of, with_xmp

PHOTO = Image.fromarray(draw(45, 30))
ALPHA = PHOTO.copy()
ALPHA.putalpha(PHOTO.getchannel("G"))
PALETTE = PHOTO.quantize(17)
HELD = ALPHA.convert("LA")
DEEP = Image.fromarray(np.arange(45 * 30, dtype=np.uint16).reshape(30, 45) * 48)


def seen(data: bytes) -> NDArray[np.uint8]:
    view = memoryview(data)
    return np.asarray(decode(view, read_header(view)))


def as_loaded(data: bytes) -> NDArray[np.uint8]:
    """As `transformers.image_transforms.convert_to_rgb` has an image of Pillow's."""
    image: Image.Image = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255))
    return np.asarray(Image.alpha_composite(white, image).convert("RGB"))


def refusal(data: bytes, picture: Picture | None = None) -> str:
    with pytest.raises(HearthError) as caught:
        decode(memoryview(data), picture or read_header(memoryview(data)))
    return caught.value.code


def png_of(bits: int, colors: int, rows: list[bytes], width: int, **chunks: bytes) -> bytes:
    """A PNG that no library of ours can write: colours of `bits`, and chunks before its pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return pack(">I", len(body)) + name + body + pack(">I", crc32(name + body))

    head = pack(">IIBBBBB", width, len(rows), bits, colors, 0, 0, 0)
    body = [(b"IHDR", head), *((name.encode(), given) for name, given in chunks.items())]
    body += [(b"IDAT", compress(b"".join(b"\0" + row for row in rows))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in body)


@pytest.mark.parametrize(
    ("image", "kind", "options"),
    [
        (PHOTO, "jpeg", {"quality": 90}),
        (PHOTO, "jpeg", {"progressive": True, "subsampling": 0}),
        (PHOTO.convert("L"), "jpeg", {}),
        (PHOTO.convert("CMYK"), "jpeg", {}),
        (PHOTO, "png", {}),
        (PHOTO.convert("1"), "png", {}),
        (PHOTO.convert("L"), "png", {"transparency": 3}),
        (HELD, "png", {}),
        (PHOTO, "png", {"transparency": (1, 2, 3)}),
        (ALPHA, "png", {}),
        (PALETTE, "png", {"transparency": 4}),
        (PALETTE, "png", {"transparency": bytes(range(17))}),
        (PALETTE, "png", {"bits": 8}),
        (PHOTO.convert("1"), "png", {"transparency": 0}),
        (PHOTO, "webp", {}),
        (ALPHA, "webp", {"lossless": True}),
        (ALPHA, "webp", {"quality": 60}),
        (PHOTO, "webp", {"save_all": True, "append_images": [PHOTO.rotate(9)]}),
        (PALETTE, "gif", {}),
        (PALETTE, "gif", {"transparency": 2}),
        (ALPHA, "gif", {"save_all": True, "append_images": [PALETTE.rotate(9)], "interlace": 1}),
    ],
    ids=lambda value: getattr(value, "mode", None),
)
def test_every_kind_is_seen_as_the_processors_see_it(image: Any, kind: str, options: Any) -> None:
    data = file_of(image, kind, **options)
    found = seen(data)
    assert found.shape == (30, 45, 3)
    np.testing.assert_array_equal(found, as_loaded(data))


@pytest.mark.parametrize("kind", ["png", "webp", "gif"])
def test_what_is_transparent_lies_on_white(kind: str) -> None:
    sheet = Image.new("RGBA", (9, 5), (0, 0, 0, 0))
    sheet.paste((0, 0, 0, 255), (2, 1, 5, 4))
    found = seen(file_of(sheet, kind, **({"lossless": True} if kind == "webp" else {})))
    expected = np.full((5, 9, 3), 255, np.uint8)
    expected[1:4, 2:5] = 0
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("bits", "colors", "row", "hidden", "expected"),
    [
        (2, 0, b"\x1b", pack(">H", 1), [0, 255, 170, 255]),
        (4, 0, b"\x12\x34", pack(">H", 3), [17, 34, 255, 68]),
        (1, 0, b"\x50", pack(">H", 1), [0, 255, 0, 255]),
        (16, 2, bytes(range(24)), pack(">3H", *(0x0607, 0x0809, 0x0A0B)), [2, 255, 14, 20]),
    ],
)
def test_a_transparent_colour_of_other_than_8_bits_is_found(
    bits: int, colors: int, row: bytes, hidden: bytes, expected: list[int]
) -> None:
    found = seen(png_of(bits, colors, [row] * 2, 4, tRNS=hidden))
    assert found[:, :, 1].tolist() == [expected] * 2


def test_a_large_transparent_picture_is_laid_on_white_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = file_of(ALPHA, "png")
    expected = as_loaded(data)
    monkeypatch.setattr(decoding, "_STRIP", 100)
    np.testing.assert_array_equal(seen(data), expected)


@pytest.mark.parametrize("colors", [0, 4])
def test_grey_of_16_bits_is_refused_by_name(colors: int) -> None:
    row = bytes(8 if colors else 4)
    with pytest.raises(HearthError) as caught:
        read_header(memoryview(png_of(16, colors, [row], 2)))
    assert caught.value.code == "image_invalid"
    assert "16 bits" in caught.value.message
    assert "scale it to 8" in caught.value.message
    assert refusal(file_of(DEEP, "png")) == "image_invalid"


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(10))
def test_pictures_are_turned_upright(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(PHOTO, kind, exif=exif)
    np.testing.assert_array_equal(seen(data), as_loaded(data))


def test_xmp_turns_as_well() -> None:
    plain = file_of(PHOTO, "jpeg")
    data = with_xmp(plain, b"<tiff:Orientation>8</tiff:Orientation>")
    np.testing.assert_array_equal(seen(data), np.rot90(seen(plain)))


def test_a_small_first_frame_is_seen_on_its_screen() -> None:
    data = bytearray(file_of(PALETTE, "gif"))
    data[6:10] = pack("<HH", 50, 28)
    assert seen(bytes(data)).shape == (30, 50, 3)
    np.testing.assert_array_equal(seen(bytes(data)), as_loaded(bytes(data)))


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "gif"])
def test_what_is_cut_off_is_refused(kind: str) -> None:
    data = file_of(PHOTO, kind)
    for share in (0.5, 0.8, 0.95):
        assert refusal(data[: int(len(data) * share)]) == "image_invalid", share


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "gif"])
def test_what_is_not_as_announced_is_refused(kind: Any) -> None:
    data = file_of(PHOTO, kind)
    assert refusal(data, Picture(kind, 45, 31)) == "image_invalid"
    assert refusal(data, Picture("png" if kind != "png" else "gif", 45, 30)) == "image_invalid"


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_a_size_that_its_bytes_cannot_have_is_refused(options: Any) -> None:
    data = bytearray(file_of(PHOTO, "jpeg", **options))
    place = data.index(b"\xff\xc2" if options else b"\xff\xc0") + 5
    assert data[place : place + 4] == pack(">HH", 30, 45)
    data[place : place + 4] = pack(">HH", 3000, 4500)
    with pytest.raises(HearthError) as caught:
        read_header(memoryview(data))
    assert caught.value.code == "image_invalid"


def test_an_empty_picture_has_bytes_enough() -> None:
    for options in ({}, {"progressive": True}, {"optimize": True}):
        assert seen(file_of(Image.new("L", (1500, 1001)), "jpeg", **options)).shape[0] == 1001


def test_a_picture_of_one_pixel_is_one() -> None:
    for kind in ("jpeg", "png", "webp", "gif"):
        assert seen(file_of(np.zeros((1, 1, 3), np.uint8), kind)).shape == (1, 1, 3)


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> Any:
        raise MemoryError

    monkeypatch.setitem(decoding._READERS, "png", full)
    assert refusal(file_of(PHOTO, "png")) == "image_too_large"


def test_no_text_of_the_decoder_comes_out() -> None:
    data = file_of(PHOTO, "png")
    with pytest.raises(HearthError) as caught:
        decode(memoryview(data[:-30]), read_header(memoryview(data)))
    assert caught.value.message == "the picture is broken or cut off"
