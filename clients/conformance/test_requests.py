"""Requests as a scripted ROUTER hears them, and those that a client does not send."""

import base64
import json
from typing import Any

import msgspec
import pytest

from clients.conformance.conftest import CLIENTS
from clients.conformance.driving import Driver
from clients.conformance.scripted import LIMITS, Peer, welcome
from hearth_client.protocol import Generate, Tokenize

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200))
JPEG = b"\xff\xd8\xff" + bytes(100)


@pytest.fixture
def driver(driver: Driver, peer: Peer) -> Driver:
    """A driver that is connected to the scripted ROUTER."""
    peer.greet(driver)
    return driver


def image(data: bytes, **fields: Any) -> dict[str, Any]:
    """A picture of a command."""
    return {"type": "image", "data": base64.b64encode(data).decode(), **fields}


def as_numbers(value: Any) -> Any:
    """The same with every number a double, as encoders may write 1.0 for 1, but not for bools."""
    if isinstance(value, dict):
        return {name: as_numbers(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_numbers(one) for one in value]
    return float(value) if type(value) is int and abs(value) < 1 << 53 else value


def without_defaults(kind: type[msgspec.Struct], message: dict[str, Any]) -> dict[str, Any]:
    """The message as the daemon reads it; raises where it would refuse it."""
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)
    return msgspec.to_builtins(read)  # type: ignore[no-any-return]


def sent(driver: Driver, peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    """The message of a generation that reaches the ROUTER."""
    driver.generate("a", **request)
    message = peer.take("generate")
    peer.finish(message["id"], "x")
    assert driver.answered("a").end["event"] == "done"
    return message


def expected(kind: type[msgspec.Struct], request: dict[str, Any]) -> dict[str, Any]:
    """The same message by the Python structs."""
    tag = kind.__struct_config__.tag
    return without_defaults(kind, {"t": tag, "id": "1", **request})


PLAIN: dict[str, Any] = {
    "prompt": "Once\u0000 🙂 \ud7ff",
    "max_tokens": 1048576,
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "logit_bias": [[0, -100.0], [2147483647, 0.5]],
    "seed": 9223372036854775807,
    "stop": ["a", "\n", "🙂"],
    "logprobs": 20,
    "ignore_eos": True,
    "priority": -10,
    "deadline_s": 0.5,
    "timestamps": True,
    "speculation": False,
    "adapter": "careful",
    "cache": "pin",
    "cache_salt": "s",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "n": 8,
}
DEEP: dict[str, Any] = {"a": [1, 2.5, None, True, {"b": {"c": ["x", -(2**63), 2**53 + 1]}}], "": {}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Parts."}]},
        {"role": "user", "content": "Hm?"},
        {
            "role": "assistant",
            "content": "I ask.",
            "reasoning": "A lamp.",
            "tool_calls": [
                {"id": "c1", "name": "set_lamp", "arguments": DEEP},
                {"id": "c2", "name": "set_lamp"},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "set_lamp", "content": ""},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
    ],
    "tools": [
        {"name": "set_lamp", "description": "A lamp.", "parameters": DEEP, "strict": True},
        {"name": "bare"},
    ],
    "tool_choice": {"name": "set_lamp"},
    "parallel_tool_calls": False,
    "template": {"enable_thinking": False, "x": None, "y": 2, "z": 0.5, "s": "text"},
    "reasoning_budget": 0,
    "response_format": {"type": "json_schema", "schema": DEEP},
    "speculation": True,
    "seed": 0,
    "temperature": 0,
}


def test_the_scenes_have_every_option() -> None:
    assert {"id", *PLAIN, *CHAT} == set(Generate.__struct_fields__)


@pytest.mark.parametrize("request_", [PLAIN, CHAT], ids=["plain", "chat"])
def test_every_option_is_sent_as_it_is(
    driver: Driver, peer: Peer, request_: dict[str, Any]
) -> None:
    message = sent(driver, peer, request_)
    assert isinstance(message.get("seed"), int)
    read = without_defaults(Generate, {**message, "id": "1"})
    assert as_numbers(read) == as_numbers(expected(Generate, request_))


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "schema": True}},
        {"response_format": {"type": "regex", "regex": "[ab]+"}},
        {"response_format": {"type": "lark", "grammar": 'start: "x"'}},
        {"cache": "bypass"},
    ],
    ids=json.dumps,
)
def test_choices_and_forms(driver: Driver, peer: Peer, fields: dict[str, Any]) -> None:
    request = {"messages": [{"role": "user", "content": "Hm?"}], **fields}
    message = sent(driver, peer, request)
    assert without_defaults(Generate, {**message, "id": "1"}) == expected(Generate, request)


def test_what_is_left_out_is_not_sent(driver: Driver, peer: Peer) -> None:
    message = sent(driver, peer, {"prompt": "x"})
    assert {name for name, value in message.items() if value is not None} >= {"t", "id", "prompt"}
    assert without_defaults(Generate, {**message, "id": "1"}) == expected(Generate, {"prompt": "x"})
    assert peer.frames == []


def test_tokenize_and_detokenize(driver: Driver, peer: Peer) -> None:
    chat = {name: CHAT[name] for name in Tokenize.__struct_fields__ if name in CHAT}
    for request in ({"text": "a 🙂"}, {"text": ""}, chat):
        driver.do("tokenize", "t", request=request)
        message = peer.take("tokenize")
        peer.say(t="tokens", id=message["id"], tokens=[1, 2])
        assert driver.answered("t").end["tokens"] == [1, 2]
        read = without_defaults(Tokenize, {**message, "id": "1"})
        assert as_numbers(read) == as_numbers(expected(Tokenize, request))
    driver.do("detokenize", "d", request={"tokens": [0, 2147483647]})
    message = peer.take("detokenize")
    assert message["tokens"] == [0, 2147483647]
    peer.say(t="text", id=message["id"], text="\ufffd")
    assert driver.answered("d").end["text"] == "\ufffd"
    driver.do("tokenize", "e", request={"text": "x"})
    peer.say(t="error", id=peer.take("tokenize")["id"], code="internal", message="No.")
    assert driver.answered("e").end["code"] == "internal"


def test_pictures_go_in_frames_of_their_own(driver: Driver, peer: Peer) -> None:
    raw = bytes(range(32))
    size = {"width": 2, "height": 4, "step": 8}
    content = [
        {"type": "text", "text": "What?"},
        image(PNG, format="png"),
        image(raw, encoding="bgr8", **size),
    ]
    message = sent(driver, peer, {"messages": [{"role": "user", "content": content}]})
    assert peer.frames == [PNG, raw]
    parts = message["messages"][0]["content"]
    told = [{name: one for name, one in part.items() if one is not None} for part in parts]
    assert told == [
        {"type": "text", "text": "What?"},
        {"type": "image", "frame": 1, "format": "png"},
        {"type": "image", "frame": 2, "encoding": "bgr8", **size},
    ]


def test_a_video_has_a_frame_for_each_picture(driver: Driver, peer: Peer) -> None:
    frames = [
        {"data": base64.b64encode(data).decode(), "format": "jpeg", "time_s": time_s}
        for data, time_s in ((JPEG + b"0", 0), (JPEG + b"1", 0.5))
    ]
    turns = [
        {"role": "user", "content": [image(PNG, format="png")]},
        {"role": "assistant", "content": "A lamp."},
        {"role": "user", "content": [{"type": "video", "frames": frames}]},
    ]
    message = sent(driver, peer, {"messages": turns})
    assert peer.frames == [PNG, JPEG + b"0", JPEG + b"1"]
    (video,) = message["messages"][2]["content"]
    assert [(one["frame"], one["format"], one["time_s"]) for one in video["frames"]] == [
        (2, "jpeg", 0),
        (3, "jpeg", 0.5),
    ]


def refused(driver: Driver, request: dict[str, Any]) -> tuple[str, str]:
    """Code and kind with which the client refuses to send a request."""
    driver.generate("r", **request)
    end = driver.expect("failed", "r")
    return end["code"], end["kind"]


def showing(*pictures: dict[str, Any]) -> dict[str, Any]:
    """A request of so many pictures."""
    return {"messages": [{"role": "user", "content": [*pictures]}]}


def test_sizes_are_checked_before_anything_is_sent(driver: Driver, peer: Peer) -> None:
    too_long = {"prompt": "x" * LIMITS["frame_bytes"]}
    assert refused(driver, too_long) == ("message_too_large", "request")
    driver.do("tokenize", "t", request={"text": "x" * LIMITS["frame_bytes"]})
    assert driver.expect("failed", "t")["code"] == "message_too_large"
    picture = image(PNG + bytes(LIMITS["image_bytes"]), format="png")
    assert refused(driver, showing(picture)) == ("image_too_large", "request")
    half = image(PNG + bytes(LIMITS["image_bytes"] - len(PNG)), format="png")
    assert refused(driver, showing(half, half, half)) == ("image_too_large", "request")
    small = image(PNG, format="png")
    assert refused(driver, showing(small, small, small, small)) == ("invalid_value", "request")
    # Nothing of it has been sent, and what is just small enough is.
    message = sent(driver, peer, showing(half, half))
    assert len(peer.frames) == 2
    assert len(message["messages"][0]["content"]) == 2


def test_a_model_that_sees_nothing_is_shown_nothing(driver: Driver, peer: Peer) -> None:
    peer.start(driver, "a")
    blind = {name: size for name, size in LIMITS.items() if "image" not in name}
    peer.say(t="error", code="hello_required", message="Who are you?")
    assert driver.answered("a").end["code"] == "connection_lost"
    driver.do("connect")
    peer.take("hello")
    peer.say(**welcome(limits=blind, features=[]))
    driver.expect("connected")
    assert refused(driver, showing(image(PNG, format="png"))) == ("unsupported_option", "request")
    peer.serves(driver)


def test_vectors_of_answers_are_read(driver: Driver, peer: Peer) -> None:
    """Each vector of a reply, sent as its bytes are but for the id."""
    vectors = json.loads((CLIENTS / "vectors" / "answers.json").read_text(encoding="utf-8"))
    ends = {"done": "done", "error": "failed"}
    kinds = {"tokens": ("tokenize", {"text": "x"}), "text": ("detokenize", {"tokens": [1]})}
    kinds["status_report"] = ("status", {})
    for vector in vectors:
        message = msgspec.msgpack.decode(bytes.fromhex(vector["hex"]))
        kind = message["t"]
        if kind in kinds:
            what, request = kinds[kind]
            driver.do(what, "v", request=request)
            peer.say(**{**message, "id": peer.take(what)["id"]})
            assert driver.answered("v").end["event"] == kind, vector
        elif kind in ends and message.get("id"):
            peer.say(**{**message, "id": peer.start(driver, "v")})
            assert driver.answered("v").end["event"] == ends[kind], vector
