import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hearth_client.errors import ImageInvalid, InvalidValue
from hearth_client.options import as_messages
from hearth_client.pictures import Image, Video
from hearth_client.protocol import ImagePart, Message, TextPart, VideoFrame, VideoPart

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


class Pillow:
    def __init__(self, mode: str) -> None:
        self.mode, self.size = mode, (2, 1)

    def convert(self, mode: str) -> "Pillow":
        return Pillow(mode)

    def tobytes(self) -> bytes:
        return self.mode.encode()


@pytest.mark.parametrize(
    ("mode", "encoding", "frame"),
    [("L", "mono8", b"L"), ("RGBA", "rgba8", b"RGBA"), ("CMYK", "rgb8", b"RGB")],
)
def test_an_image_of_pillow_says_what_it_is(mode: str, encoding: str, frame: bytes) -> None:
    image = Image(Pillow(mode))
    assert image.says == {"encoding": encoding, "width": 2, "height": 1}
    assert image.frame == frame


@pytest.mark.parametrize(
    ("source", "encoding", "error"),
    [
        (b"no picture", None, ImageInvalid),
        (7, None, ImageInvalid),
        (pixels(2, 2, 3), None, InvalidValue),
        (pixels(2, 2, 3), "rgb16", InvalidValue),
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
