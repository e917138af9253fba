import array
from types import SimpleNamespace as Message

import pytest

from hearth_client import HearthClientError
from hearth_ros.images import LatestImage, picture_of

PIXELS = bytes(range(24))


def image(data: object, encoding: str = "rgb8", step: int = 12) -> Message:
    return Message(data=data, encoding=encoding, width=3, height=2, step=step)


@pytest.mark.parametrize("data", [PIXELS, array.array("B", PIXELS)])
def test_raw_pixels_are_taken_as_they_lie(data: object) -> None:
    picture = picture_of(image(data))
    assert bytes(picture.frame) == PIXELS
    assert picture.says == {"encoding": "rgb8", "width": 3, "height": 2, "step": 12}


@pytest.mark.parametrize(("data", "kind"), [(b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n", "png")])
def test_a_file_is_told_by_its_first_bytes(data: bytes, kind: str) -> None:
    picture = picture_of(Message(format="rgb8; jpeg compressed bgr8", data=array.array("B", data)))
    assert (picture.frame, picture.says) == (data, {"format": kind})


@pytest.mark.parametrize(
    "message",
    [
        image(PIXELS, "16UC1"),
        image(PIXELS, "rgb8", step=11),
        Message(format="16UC1; compressedDepth png", data=b"\x00" * 12 + b"\x89PNG"),
        Message(format="jpeg", data=b"none"),
    ],
)
def test_what_the_daemon_does_not_read_is_refused(message: Message) -> None:
    with pytest.raises(HearthClientError) as caught:
        picture_of(message)
    assert caught.value.code in {"image_invalid", "invalid_value"}


def test_the_latest_image_wins() -> None:
    slot = LatestImage(rate_hz=0, late_frame_s=0)
    assert slot.latest(0.0) == (None, None)
    assert [slot.offer(n, stamp_s=1.0, now_s=1.0 + n / 1000) for n in range(3)] == [True] * 3
    assert slot.latest(900.0) == (2, None)
    slot.clear()
    assert slot.latest(900.0) == (None, None)


def test_images_that_come_too_fast_are_left_out() -> None:
    slot = LatestImage(rate_hz=2, late_frame_s=0)
    taken = [slot.offer(now, stamp_s=now, now_s=now) for now in (10.0, 10.2, 10.4, 10.5, 11.2)]
    assert taken == [True, False, False, True, True]
    assert (slot.taken, slot.left_out) == (3, 2)
    assert slot.offer("reset", stamp_s=1.0, now_s=1.0), "a bag that starts again"


def test_a_late_frame_is_told_with_its_age() -> None:
    slot = LatestImage(rate_hz=0, late_frame_s=1)
    slot.offer("old", stamp_s=10.0, now_s=12.5)
    assert slot.latest(12.5) == ("old", 2.5)
    slot.offer("fresh", stamp_s=12.4, now_s=12.5)
    assert slot.latest(12.5) == ("fresh", None)
    slot.offer("without a stamp", stamp_s=0.0, now_s=20.0)
    assert slot.latest(20.5) == ("without a stamp", None)
    assert slot.late == 1
