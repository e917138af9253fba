import itertools
import zlib
from io import BytesIO
from struct import pack
from typing import Any
from zlib import compress, crc32

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing import decoding, headers
from hearth.runtime.image_processing.decoding import decode
from hearth.runtime.image_processing.headers import MOST_PIXELS, parse_header, read_header
from hearth.runtime.image_processing.raw_frames import raw_size, to_rgb
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


PIXELS = draw(37, 21)


def header_refusal(data: bytes) -> str:
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
    assert header_refusal(data) == "image_too_large"
    side = 1 << 13
    assert side * side == MOST_PIXELS
    assert read_header(memoryview(bomb(side, side))) == Picture("png", side, side)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_a_picture_has_pixels(size: tuple[int, int]) -> None:
    assert header_refusal(bomb(*size)) == "image_invalid"


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "gif"])
def test_what_is_cut_off_in_its_header_is_refused(kind: str) -> None:
    data = file_of(PIXELS, kind)
    assert {header_refusal(data[:length]) for length in range(13)} == {"image_invalid"}


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
    assert header_refusal(data) == "image_invalid"


def test_no_file_is_looked_through_for_long() -> None:
    many = [
        b"\xff\xd8\xff" + b"\xfe\0\x02\xff" * (1 << 17),
        bomb(5, 5)[:-12] + png_chunk(b"teXt", b"") * (1 << 17),
        b"RIFF\xff\xff\xff\x7fWEBP" + b"ABCD\0\0\0\0" * (1 << 17),
        b"GIF89a\x05\0\x05\0\0\0\0" + b"!\xfe\0" * (1 << 17),
    ]
    assert {header_refusal(data) for data in many} == {"image_invalid"}


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
    assert header_refusal(pieces + b"," + pack("<HHHH", 0, 0, 3, 2)) == "image_invalid"


RAW = draw(6, 4)
RAW_ALPHA = np.dstack([RAW, np.full((4, 6), 9, np.uint8)])


@pytest.mark.parametrize("pad", [0, 5])
@pytest.mark.parametrize(
    ("kind", "stored", "seen"),
    [
        ("rgb8", RAW, RAW),
        ("bgr8", RAW[:, :, ::-1], RAW),
        ("rgba8", RAW_ALPHA, RAW),
        ("bgra8", RAW_ALPHA[:, :, [2, 1, 0, 3]], RAW),
        ("mono8", RAW[:, :, 1], RAW[:, :, [1, 1, 1]]),
        ("8UC1", RAW[:, :, 1], RAW[:, :, [1, 1, 1]]),
        ("8UC3", RAW[:, :, ::-1], RAW),
        ("8UC4", RAW_ALPHA[:, :, [2, 1, 0, 3]], RAW),
    ],
)
def test_rows_may_be_longer_than_their_pixels(kind: Any, stored: Any, seen: Any, pad: int) -> None:
    rows = np.pad(stored.reshape(4, -1), ((0, 0), (0, pad)), constant_values=77)
    picture = Picture(kind, 6, 4, rows.shape[1])
    assert raw_size(picture) == rows.size
    np.testing.assert_array_equal(np.asarray(decode(memoryview(rows.tobytes()), picture)), seen)


def test_colours_in_their_order_are_not_copied() -> None:
    data = bytearray(RAW.tobytes())
    seen = to_rgb(memoryview(data), Picture("rgb8", 6, 4, 18))
    data[:3] = b"\1\2\3"
    assert seen[0, 0].tolist() == [1, 2, 3]


def opencv(y: int, u: int, v: int) -> list[int]:
    """A pixel by OpenCV's formula, as its color_yuv.simd.hpp has it, in whole numbers."""
    light = max(0, y - 16) * 1220542
    half = 1 << 19
    sums = (
        light + half + 1673527 * (v - 128),
        light + half - 852492 * (v - 128) - 409993 * (u - 128),
        light + half + 2116026 * (u - 128),
    )
    return [min(255, max(0, value >> 20)) for value in sums]


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("kind", ["yuv422_yuy2", "yuyv", "yuv422", "uyvy"])
def test_pairs_of_yuv_are_turned_as_opencv_does(kind: Any, pad: int) -> None:
    packed = np.random.default_rng(1).integers(0, 256, (4, 3, 2, 2), np.uint8)
    # In both a byte of luma and one of colours by turns, and one of them comes first.
    stored = packed if kind in {"yuv422_yuy2", "yuyv"} else packed[..., ::-1]
    rows = np.pad(stored.reshape(4, 12), ((0, 0), (0, pad)))
    seen = np.asarray(decode(memoryview(rows.tobytes()), Picture(kind, 6, 4, 12 + pad)))
    for row, pair, place in np.ndindex(4, 3, 2):
        y, u, v = packed[row, pair, place, 0], packed[row, pair, 0, 1], packed[row, pair, 1, 1]
        assert seen[row, 2 * pair + place].tolist() == opencv(int(y), int(u), int(v))


@pytest.mark.parametrize("pad", [0, 3])
def test_planes_of_yuv_are_turned_as_opencv_does(pad: int) -> None:
    random = np.random.default_rng(1)
    planes = random.integers(0, 256, (6, 6), np.uint8)
    rows = np.pad(planes, ((0, 0), (0, pad)))
    seen = np.asarray(decode(memoryview(rows.tobytes()), Picture("nv12", 6, 4, 6 + pad)))
    for row, column in np.ndindex(4, 6):
        u, v = planes[4 + row // 2, column // 2 * 2 :][:2]
        expected = opencv(int(planes[row, column]), int(u), int(v))
        assert seen[row, column].tolist() == expected


BAYER = ["bayer_rggb8", "bayer_bggr8", "bayer_gbrg8", "bayer_grbg8"]


def colour_at(kind: str, row: int, column: int) -> int:
    """Which of red, green and blue a sensor has there."""
    return "rgb".index(kind[6:10][row % 2 * 2 + column % 2])


@pytest.mark.parametrize("size", [(6, 4), (7, 5), (2, 2)])
@pytest.mark.parametrize("kind", BAYER)
def test_colours_of_a_bayer_sensor_are_means_of_those_around(
    kind: Any, size: tuple[int, int]
) -> None:
    width, height = size
    raw = np.random.default_rng(2).integers(0, 256, (height, width), np.uint8)
    rows = np.pad(raw, ((0, 0), (0, 3)))
    seen = np.asarray(decode(memoryview(rows.tobytes()), Picture(kind, width, height, width + 3)))
    # Beyond the border lies what lies as far inside it.
    near = np.pad(raw, 1, "reflect").astype(int)
    for row, column, color in np.ndindex(height, width, 3):
        if colour_at(kind, row, column) == color:
            expected = raw[row, column]
        else:
            around = [
                near[row + 1 + y, column + 1 + x]
                for y, x in itertools.product((-1, 0, 1), repeat=2)
                if colour_at(kind, row + y, column + x) == color
            ]
            expected = (sum(around) + len(around) // 2) // len(around)
        assert seen[row, column, color] == expected, (row, column, color)


@pytest.mark.parametrize("kind", BAYER)
def test_one_colour_of_a_bayer_sensor_is_that_colour(kind: Any) -> None:
    flat = [200, 90, 10]
    raw = bytes(flat[colour_at(kind, row, column)] for row in range(4) for column in range(6))
    seen = np.asarray(decode(memoryview(raw), Picture(kind, 6, 4, 6)))
    assert (seen == flat).all()


def test_known_colours() -> None:
    grey = np.asarray(
        decode(memoryview(bytes([16, 128, 235, 128])), Picture("yuv422_yuy2", 2, 1, 4))
    )
    assert grey.tolist() == [[[0, 0, 0], [255, 255, 255]]]


@pytest.mark.parametrize(
    ("picture", "code"),
    [
        (Picture("rgb8", 6, 4, 17), "image_invalid"),
        (Picture("rgb8", 6, 4, 0), "image_invalid"),
        (Picture("mono8", 0, 4, 8), "image_invalid"),
        (Picture("mono8", 4, -1, 8), "image_invalid"),
        (Picture("yuv422_yuy2", 5, 4, 10), "image_invalid"),
        (Picture("uyvy", 5, 4, 10), "image_invalid"),
        (Picture("bayer_rggb8", 1, 4, 1), "image_invalid"),
        (Picture("bayer_rggb8", 4, 1, 4), "image_invalid"),
        (Picture("nv12", 5, 4, 6), "image_invalid"),
        (Picture("nv12", 6, 3, 6), "image_invalid"),
        (Picture("mono8", 1 << 14, 1 << 14, 1 << 14), "image_too_large"),
    ],
)
def test_what_cannot_be_is_refused(picture: Picture, code: str) -> None:
    with pytest.raises(HearthError) as caught:
        raw_size(picture)
    assert caught.value.code == code


@pytest.mark.parametrize("size", [0, 71, 73])
def test_the_bytes_have_to_fit_the_size(size: int) -> None:
    with pytest.raises(HearthError) as caught:
        np.asarray(decode(memoryview(bytes(size)), Picture("rgb8", 6, 4, 18)))
    assert caught.value.code == "image_invalid"
