import array
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from PIL import Image as PillowImages

from hearth.runtime.image_processing.raw_frames import PIXEL_BYTES
from hearth_client import pictures
from hearth_client.errors import ImageInvalid, InvalidValue
from hearth_client.options import as_messages
from hearth_client.pictures import Image, Video
from hearth_client.protocol import ImagePart, Message, RawEncoding, TextPart, VideoFrame, VideoPart

PNG = b"\x89PNG\r\n\x1a\nrest"


def pixels(*shape: int) -> memoryview:
    size = 1
    for side in shape:
        size *= side
    return memoryview(bytes(range(256)) * (size // 256 + 1))[:size].cast("B", shape=shape)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"\xff\xd8\xff\xe0", "jpeg"),
        (PNG, "png"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "webp"),
        (b"GIF89a", "gif"),
    ],
)
def test_a_file_is_known_by_its_first_bytes(head: bytes, name: str, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(head)
    for source in (head, path, str(path)):
        image = Image(source)
        assert (image.frame, image.says) == (head, {"format": name})


@pytest.mark.parametrize(
    ("encoding", "shape", "size"),
    [
        ("rgb8", (4, 6, 3), (6, 4)),
        ("bgra8", (4, 6, 4), (6, 4)),
        ("mono8", (4, 6), (6, 4)),
        ("mono8", (4, 6, 1), (6, 4)),
        ("yuv422_yuy2", (4, 6, 2), (6, 4)),
        ("nv12", (6, 6), (6, 4)),
    ],
)
def test_an_array_is_sent_without_a_copy(encoding: Any, shape: Any, size: Any) -> None:
    data = pixels(*shape)
    image = Image(data, encoding)
    assert image.says == {"encoding": encoding, "width": size[0], "height": size[1]}
    assert isinstance(image.frame, memoryview)
    assert image.frame.obj is data.obj
    assert image.frame == data.cast("B")


def test_rows_with_gaps_are_sent_without_them() -> None:
    view = pixels(4, 6, 3)[::2]
    image = Image(view, "rgb8")
    assert image.says["height"] == 2
    assert image.frame == view.tobytes()


@pytest.mark.parametrize(
    "held", [bytes, bytearray, memoryview, lambda data: array.array("B", data)]
)
@pytest.mark.parametrize(
    ("encoding", "size"),
    [("rgb8", 48), ("8UC3", 48), ("8UC1", 16), ("bayer_rggb8", 16), ("uyvy", 32), ("nv12", 24)],
)
def test_flat_bytes_as_a_message_of_ros_holds_them_need_a_size(
    held: Any, encoding: str, size: int
) -> None:
    data = bytes(range(size))
    image = Image(held(data), encoding, width=4, height=4)
    assert image.says == {"encoding": encoding, "width": 4, "height": 4}
    assert image.frame == data


def test_rows_of_flat_bytes_may_be_padded() -> None:
    data = array.array("B", bytes(range(32)))
    image = Image(data, "8UC3", width=5, height=2, step=16)
    assert image.says == {"encoding": "8UC3", "width": 5, "height": 2, "step": 16}
    assert image.frame == data.tobytes()


def test_a_size_that_an_array_has_may_be_told() -> None:
    told = Image(np.zeros((4, 6, 3), np.uint8), "bgr8", width=6, height=4, step=18)
    assert told.says == {"encoding": "bgr8", "width": 6, "height": 4}


@pytest.mark.parametrize("kind", [int, np.int64, np.uint32])
def test_a_size_may_be_a_number_of_numpy(kind: Any) -> None:
    told = Image(bytes(80), "bgr8", width=kind(6), height=kind(4), step=kind(20))
    says = {"encoding": "bgr8", "width": 6, "height": 4, "step": 20}
    assert msgspec.json.decode(msgspec.json.encode(told.says)) == says


@pytest.mark.parametrize("encoding", ["mono16", "16UC1", "32FC1", "bayer_rggb16", "rgb16"])
def test_more_than_8_bits_are_refused_by_name(encoding: str) -> None:
    with pytest.raises(InvalidValue, match=f"{encoding} .*scale .* to 8 bits") as caught:
        Image(bytes(8), encoding, width=2, height=2)
    assert caught.value.field == "encoding"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"width": 4}, "height"),
        ({"height": 4}, "width"),
        ({"step": 12}, "width"),
        ({"width": 0, "height": 4}, "width"),
        ({"width": 4, "height": -4}, "height"),
        ({"width": 4, "height": 4, "step": 11}, "step"),
        ({"width": 4, "height": 4, "step": 13}, "step"),
        ({"width": 4, "height": 3}, "height"),
        ({"width": 4.0, "height": 4}, "width"),
        ({"width": 4, "height": "4"}, "height"),
    ],
)
def test_a_size_that_the_bytes_do_not_have_is_refused_by_its_field(given: Any, field: str) -> None:
    with pytest.raises((ImageInvalid, InvalidValue)) as caught:
        Image(bytes(48), "rgb8", **given)
    assert caught.value.field == field


def test_a_file_and_an_image_of_pillow_know_their_size() -> None:
    for source in (PNG, Pillow("RGB")):
        with pytest.raises(InvalidValue):
            Image(source, width=2, height=1)


class Pillow:
    def __init__(self, mode: str) -> None:
        self.mode, self.size = mode, (2, 1)
        self.info: dict[str, object] = {}

    def convert(self, mode: str) -> "Pillow":
        return Pillow(mode)

    def tobytes(self) -> bytes:
        return self.mode.encode()


@pytest.mark.parametrize(
    ("mode", "encoding", "frame"),
    [("L", "mono8", b"L"), ("RGBX", "rgba8", b"RGBX"), ("CMYK", "rgb8", b"RGB")],
)
def test_an_image_of_pillow_says_what_it_is(mode: str, encoding: str, frame: bytes) -> None:
    image = Image(Pillow(mode))
    assert image.says == {"encoding": encoding, "width": 2, "height": 1}
    assert image.frame == frame


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_a_transparent_image_of_pillow_lies_on_white(mode: str) -> None:
    sheet = PillowImages.new("RGBA", (3, 1), (0, 0, 0, 0))
    sheet.putpixel((1, 0), (0, 0, 0, 255))
    given = sheet.convert(mode)
    if mode == "P":
        given = sheet.convert("RGB").quantize(2)
        given.putdata([0, 1, 0])
        given.putpalette([9, 9, 9, 0, 0, 0])
        given.info["transparency"] = 0
    image = Image(given)
    assert image.says == {"encoding": "rgb8", "width": 3, "height": 1}
    assert image.frame == b"\xff" * 3 + b"\0" * 3 + b"\xff" * 3


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_an_image_of_pillow_of_more_than_8_bits_is_refused(mode: str) -> None:
    with pytest.raises(ImageInvalid, match="scale it to 8"):
        Image(PillowImages.new(mode, (2, 2)))


@pytest.mark.parametrize(
    ("source", "encoding", "error"),
    [
        (b"no picture", None, ImageInvalid),
        (7, None, ImageInvalid),
        (pixels(2, 2, 3), None, InvalidValue),
        (pixels(2, 2, 3), "rgb16", InvalidValue),
        (pixels(2, 2, 3), "cmyk8", InvalidValue),
        (pixels(2, 2, 3), "rgba8", ImageInvalid),
        (pixels(2, 2), "rgb8", ImageInvalid),
        (array.array("f", [0.0]), "mono8", ImageInvalid),
        (pixels(2, 2, 3).cast("B").cast("b", (2, 2, 3)), "rgb8", ImageInvalid),
        (pixels(12).cast("?", (2, 2, 3)), "rgb8", ImageInvalid),
        (np.zeros((0, 2, 3), np.uint8), "rgb8", ImageInvalid),
        (PNG, "rgb8", ImageInvalid),
        (Pillow("RGB"), "rgb8", ImageInvalid),
    ],
)
def test_what_is_no_picture_is_refused(source: Any, encoding: Any, error: Any) -> None:
    with pytest.raises(error):
        Image(source, encoding)


def test_a_turn_may_have_text_images_and_videos_in_their_order() -> None:
    image, raw = Image(PNG), Image(pixels(1, 2, 3), "rgb8")
    turns: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": ["see", image, Video([raw, PNG], [0.0, 0.5]), "and tell"]},
    ]
    messages, frames = as_messages(turns)
    says: Any = raw.says
    assert messages == [
        Message(role="system", content="be brief"),
        Message(
            role="user",
            content=[
                TextPart(text="see"),
                ImagePart(frame=1, format="png"),
                VideoPart(
                    frames=[
                        VideoFrame(frame=2, time_s=0.0, **says),
                        VideoFrame(frame=3, time_s=0.5, format="png"),
                    ]
                ),
                TextPart(text="and tell"),
            ],
        ),
    ]
    assert frames == [PNG, raw.frame, PNG]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(messages), type=list[Message]) == messages


def test_a_part_that_is_nothing_and_times_that_are_too_few_are_refused() -> None:
    wrong: Any = [{"role": "user", "content": ["see", PNG]}]
    with pytest.raises(InvalidValue) as caught:
        as_messages(wrong)
    assert caught.value.field == "messages[0].content"
    with pytest.raises(InvalidValue):
        Video([PNG], [])


def test_encodings_are_those_of_the_protocol_and_of_the_daemon() -> None:
    assert set(pictures._CHANNELS) == set(get_args(RawEncoding))
    assert pictures._CHANNELS == PIXEL_BYTES
