import itertools
from typing import Any

import numpy as np
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.decoding import decode
from hearth.runtime.image_processing.raw_frames import raw_size, to_rgb
from hearth.runtime.images import Picture
from tests.runtime.image_processing.photographs import draw

PIXELS = draw(6, 4)
ALPHA = np.dstack([PIXELS, np.full((4, 6), 9, np.uint8)])


@pytest.mark.parametrize("pad", [0, 5])
@pytest.mark.parametrize(
    ("kind", "stored", "seen"),
    [
        ("rgb8", PIXELS, PIXELS),
        ("bgr8", PIXELS[:, :, ::-1], PIXELS),
        ("rgba8", ALPHA, PIXELS),
        ("bgra8", ALPHA[:, :, [2, 1, 0, 3]], PIXELS),
        ("mono8", PIXELS[:, :, 1], PIXELS[:, :, [1, 1, 1]]),
        ("8UC1", PIXELS[:, :, 1], PIXELS[:, :, [1, 1, 1]]),
        ("8UC3", PIXELS[:, :, ::-1], PIXELS),
        ("8UC4", ALPHA[:, :, [2, 1, 0, 3]], PIXELS),
    ],
)
def test_rows_may_be_longer_than_their_pixels(kind: Any, stored: Any, seen: Any, pad: int) -> None:
    rows = np.pad(stored.reshape(4, -1), ((0, 0), (0, pad)), constant_values=77)
    picture = Picture(kind, 6, 4, rows.shape[1])
    assert raw_size(picture) == rows.size
    np.testing.assert_array_equal(np.asarray(decode(memoryview(rows.tobytes()), picture)), seen)


def test_colours_in_their_order_are_not_copied() -> None:
    data = bytearray(PIXELS.tobytes())
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
