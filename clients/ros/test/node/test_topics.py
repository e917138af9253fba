import json
import time
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from hearth_msgs.msg import Turn

QUESTION = "Which device is at the bottom right?"
FILM = {
    "/camera/image": ("image", "Image"),
    "/camera/image/compressed": ("image/compressed", "CompressedImage"),
}


def text_of(queue: "Queue[Any]") -> str:
    return queue.get(timeout=30).data


def show(ros: Any, node: str, frames: dict[str, list[bytes]], topic: str) -> None:
    """Play a topic of the bag to the node, which takes the last picture."""
    name, kind = FILM[topic]
    values = ros.diagnostics()
    for number, frame in enumerate(frames[topic], 1):
        ros.publish(f"/{node}/{name}", frame, kind)
        wait_for(values, node, "pictures taken", str(number))


def wait_for(diagnostics: "Queue[Any]", node: str, key: str, value: str) -> dict[str, str]:
    """All values of the node's first diagnostics that have this one."""
    deadline, found = time.monotonic() + 30, {}
    while found.get(key) != value:
        assert time.monotonic() < deadline, found
        (status,) = diagnostics.get(timeout=30).status
        if status.name == f"{node}: daemon":
            found = {one.key: one.value for one in status.values}
    return found


def test_a_prompt_is_answered_and_remembered(ros: Any, node: str) -> None:
    stream, sentences, response = (
        ros.listen(f"/{node}/{name}") for name in ("stream", "sentences", "response")
    )
    ros.publish(f"/{node}/prompt", "Tell me a story")
    text = text_of(response)
    heard = [text_of(sentences) for _ in range(text.count("."))]
    assert " ".join(heard) == text
    assert len(heard) > 3
    streamed = ""
    while streamed != text:
        streamed += text_of(stream)
    ros.publish(f"/{node}/prompt", "The spare key is in the blue box")
    assert "blue box" in text_of(response)
    ros.publish(f"/{node}/prompt", "Where is the spare key?")
    assert text_of(response) == "The spare key is in the blue box."


def test_a_prompt_that_fails_says_so(ros: Any, node: str) -> None:
    errors = ros.listen(f"/{node}/error")
    ros.publish(f"/{node}/prompt", "")
    assert text_of(errors).partition(": ")[0] in {"invalid_value", "prompt_empty"}


@pytest.mark.parametrize("topic", FILM)
def test_a_picture_of_a_camera_is_asked_about(
    ros: Any, seeing: Any, frames: dict[str, list[bytes]], topic: str
) -> None:
    node = f"eye_{FILM[topic][1].lower()}"
    parameters = {"address": str(seeing.socket), "image_rate_hz": 0.0, "diagnostics_period_s": 0.2}
    with ros.hearth(node, **parameters) as process:
        response, errors = ros.listen(f"/{node}/response"), ros.listen(f"/{node}/error")
        show(ros, node, frames, topic)
        ros.publish(f"/{node}/prompt", QUESTION)
        assert text_of(response) == "It is a fan."
        goal = ros.goal_type(messages=[Turn(role="user", content=QUESTION)], latest_image=True)
        state, result = ros.send(node, goal).end()
        assert (state, result.text) == ("succeeded", "It is a fan.")
        assert errors.empty()
        # The pictures of the bag were taken years ago.
        wait_for(ros.diagnostics(), node, "pictures late", "2")
    assert "the newest picture is" in process.log()


def test_pictures_of_a_goal(ros: Any, seeing: Any, frames: dict[str, list[bytes]]) -> None:
    raw = ros.message("Image", frames["/camera/image"][1])
    file = ros.message("CompressedImage", frames["/camera/image/compressed"][1])
    with ros.hearth("eye", address=str(seeing.socket)):
        for pictures in ({"images": [raw]}, {"compressed_images": [file]}):
            turn = Turn(role="user", content=QUESTION, **pictures)
            _, result = ros.send("eye", ros.goal_type(messages=[turn])).end()
            assert result.text == "It is a fan."


def test_pictures_come_no_faster_than_told(
    ros: Any, home: Any, frames: dict[str, list[bytes]]
) -> None:
    parameters = {"address": str(home.socket), "image_rate_hz": 0.01, "diagnostics_period_s": 0.2}
    with ros.hearth("slow_eye", **parameters):
        diagnostics = ros.diagnostics()
        first, second = frames["/camera/image"]
        ros.publish("/slow_eye/image", first, "Image")
        wait_for(diagnostics, "slow_eye", "pictures taken", "1")
        ros.publish("/slow_eye/image", second, "Image")
        values = wait_for(diagnostics, "slow_eye", "pictures left out", "1")
        assert values["pictures taken"] == "1"


def test_a_scene(ros: Any, seeing: Any, frames: dict[str, list[bytes]], tmp_path: Path) -> None:
    """A camera sees a fan, somebody asks for it, a service switches it, and the node speaks."""
    devices = ["lamp", "fan", "robot", "television", "plug", "door"]
    schema = {
        "type": "object",
        "properties": {"action": {"enum": ["turn_on", "turn_off"]}, "device": {"enum": devices}},
        "required": ["action", "device"],
    }
    tool = {"name": "set", "description": "Switch a device on or off.", "parameters": schema}
    (tmp_path / "tools.json").write_text(json.dumps([tool | {"service": "/switch"}]))
    called: Queue[Any] = Queue()
    ros.serve(
        "/switch",
        "hearth_msgs/CallTool",
        lambda request: called.put(request) or {"success": True, "content": "ok"},
    )
    parameters = {
        "address": str(seeing.socket),
        "image_rate_hz": 0.0,
        "tools_file": str(tmp_path / "tools.json"),
        "tool_choice": "required",
        "max_tokens": 64,
        "options": '{"parallel_tool_calls": false}',
        "diagnostics_period_s": 0.2,
    }
    with ros.hearth("scene", **parameters):
        sentences, response = ros.listen("/scene/sentences"), ros.listen("/scene/response")
        show(ros, "scene", frames, "/camera/image")
        ros.publish("/scene/prompt", "Turn on the device at the bottom right")
        request = called.get(timeout=30)
        assert json.loads(request.arguments) == {"action": "turn_on", "device": "fan"}
        text = text_of(response)
        assert text.startswith(text_of(sentences))
