from typing import Any

import numpy as np
import pytest

from runtime.errors import HearthError
from runtime.images import Picture
from runtime.pictures.decoding import decode
from runtime.pictures.raw_frames import raw_size, to_rgb
from tests.runtime.pictures.photographs import draw

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
def test_yuv_is_turned_as_opencv_does(pad: int) -> None:
    random = np.random.default_rng(1)
    packed = random.integers(0, 256, (4, 3, 2, 2), np.uint8)
    rows = np.pad(packed.reshape(4, 12), ((0, 0), (0, pad)))
    seen = np.asarray(decode(memoryview(rows.tobytes()), Picture("yuv422_yuy2", 6, 4, 12 + pad)))
    for row, pair, place in np.ndindex(4, 3, 2):
        y, u, v = packed[row, pair, place, 0], packed[row, pair, 0, 1], packed[row, pair, 1, 1]
        assert seen[row, 2 * pair + place].tolist() == opencv(int(y), int(u), int(v))
    planes = random.integers(0, 256, (6, 6), np.uint8)
    rows = np.pad(planes, ((0, 0), (0, pad)))
    seen = np.asarray(decode(memoryview(rows.tobytes()), Picture("nv12", 6, 4, 6 + pad)))
    for row, column in np.ndindex(4, 6):
        u, v = planes[4 + row // 2, column // 2 * 2 :][:2]
        expected = opencv(int(planes[row, column]), int(u), int(v))
        assert seen[row, column].tolist() == expected


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
