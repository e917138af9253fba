"""Pictures and videos, shown to the shipped model that sees."""

import base64
from typing import Any

import numpy as np
import pytest

from clients.conformance.conftest import Drive
from clients.conformance.driving import Driver
from hearth.daemon.demo import show
from hearth.daemon.own_daemon import OwnDaemon
from hearth_client import Client as Reference
from hearth_client import Image, Video

QUESTION = "What is left of the star?"


@pytest.fixture
def driver(drive: Drive, seeing: OwnDaemon) -> Driver:
    """A driver that is connected to the daemon that sees."""
    started = drive(seeing.socket)
    started.connect()
    return started


def pixels(seed: int, width: int = 48, height: int = 32) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A picture, [height, width, 3]."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (height, width, 3), dtype=np.uint8)


def told(data: bytes, **fields: Any) -> dict[str, Any]:
    """A picture of a command."""
    return {"data": base64.b64encode(data).decode(), **fields}


def ask(driver: Driver, *parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The reply to parts and the question, and how it ended."""
    content = [*parts, {"type": "text", "text": QUESTION}]
    answered = driver.ask("a", messages=[{"role": "user", "content": content}], max_tokens=24)
    assert answered.end["event"] == "done", answered.end
    return answered.joined(), answered.end


def reference(daemon: OwnDaemon, part: Image | Video) -> str:
    """The reply that the Python client gets."""
    with Reference(daemon.socket) as client:
        turns = [{"role": "user", "content": [part, QUESTION]}]
        return client.generate(messages=turns, max_tokens=24).text()


def test_a_file(driver: Driver, seeing: OwnDaemon) -> None:
    data = show.PICTURE.read_bytes()
    text, end = ask(driver, {"type": "image", **told(data, format="jpeg")})
    assert text == reference(seeing, Image(data))
    assert (end["images"]["count"], len(end["images"]["sizes"])) == (1, 1)
    assert end["images"]["tokens"] > 0


def test_raw_pixels_with_a_step(driver: Driver, seeing: OwnDaemon) -> None:
    array = pixels(1)
    rows = np.zeros((32, 160), np.uint8)
    rows[:, :144] = array.reshape(32, 144)
    size = {"encoding": "rgb8", "width": 48, "height": 32}
    text, _ = ask(driver, {"type": "image", **told(rows.tobytes(), step=160, **size)})
    assert text == reference(seeing, Image(array, "rgb8"))
    again, end = ask(driver, {"type": "image", **told(array.tobytes(), **size)})
    assert again == text
    assert end["images"]["tokens"] > 0


def test_a_video(driver: Driver, seeing: OwnDaemon) -> None:
    arrays = [pixels(seed) for seed in range(2, 6)]
    times = [0.0, 0.5, 1.0, 1.5]
    frames = [
        told(array.tobytes(), encoding="bgr8", width=48, height=32, time_s=time_s)
        for array, time_s in zip(arrays, times, strict=True)
    ]
    text, end = ask(driver, {"type": "video", "frames": frames})
    video = Video([Image(array, "bgr8") for array in arrays], times)
    assert text == reference(seeing, video)
    assert end["images"]["count"] == 1


def refused(driver: Driver, *parts: dict[str, Any]) -> dict[str, Any]:
    """The failure of a request that shows these."""
    driver.generate("r", messages=[{"role": "user", "content": [*parts]}])
    answered = driver.answered("r")
    assert (answered.end["event"], answered.end["kind"]) == ("failed", "request")
    return answered.end


def test_refusals_name_the_picture(driver: Driver) -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(64)
    broken = {"type": "image", **told(png, format="png")}
    assert refused(driver, broken)["code"] == "image_invalid"
    short = {"type": "image", **told(bytes(9), encoding="rgb8", width=4, height=4)}
    assert refused(driver, short)["code"] in {"image_invalid", "invalid_value"}
    large = {"type": "image", **told(png + bytes(1 << 17), format="png")}
    assert refused(driver, large)["code"] == "image_too_large"
    text, _ = ask(driver)
    assert text
