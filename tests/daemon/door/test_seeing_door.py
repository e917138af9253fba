"""A front door before a model that sees: frames of clients, until their request has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from hearth.actors.arena import Arena
from hearth.actors.messages import TurnPart
from hearth.daemon.door import front_door
from hearth.daemon.door.finished import FinishedRequest
from hearth.daemon.door.socket import Received
from hearth_client import (
    AsyncClient,
    Client,
    Image,
    ImageTooLarge,
    InvalidValue,
    UnsupportedOption,
    Video,
)
from tests.daemon.door.harness import (
    BACKENDS,
    Harness,
    greet,
    hear,
    raw_client,
    running_door,
    say,
    until,
)

SIZE = 1 << 20
CANCEL = {"t": "cancel", "id": "g"}
LIMITS: dict[str, Any] = {"images_per_request": 3, "image_bytes": 1 << 16, "image_tokens": 64}
LIMITS["images_in_flight_bytes"] = 100_000


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    made = Arena.create("test", SIZE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ended() -> list[FinishedRequest]:
    return []


@pytest.fixture(scope="module")
def door(arena: Arena, ended: list[FinishedRequest]) -> Iterator[Harness]:
    with running_door(arena=arena, listeners=[ended.append], **LIMITS) as harness:
        yield harness


def turns(word: str, *frames: int) -> list[dict[str, Any]]:
    parts = [
        {"type": "image", "frame": frame, "encoding": "mono8", "width": 10, "height": 10}
        for frame in frames
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": word}]}]


def asked(word: str, *frames: int, **more: Any) -> dict[str, Any]:
    return {"t": "generate", "id": "g", "messages": turns(word, *frames), **more}


def held(door: Harness) -> int:
    pictures = door.door.state.pictures
    assert pictures is not None
    return door.on_loop(lambda: pictures.bytes)


def test_the_welcome_says_what_may_be_sent(door: Harness) -> None:
    with raw_client(door.path) as client:
        welcome = greet(client)
    limits = welcome["limits"]
    assert "images" in welcome["features"]
    assert welcome["features"] == sorted(welcome["features"])
    assert (limits["images"], limits["image_bytes"]) == (3, 1 << 16)
    assert (limits["request_image_bytes"], limits["image_tokens"]) == (100_000, 64)
    assert limits["frames"] == 4


def test_pictures_lie_in_the_arena_until_their_request_has_ended(
    door: Harness, ended: list[FinishedRequest]
) -> None:
    frames = [bytes([7]) * 100, bytes([8]) * 100]
    with Client(door.path) as client:
        images = [Image(memoryview(one).cast("B", (10, 10)), "mono8") for one in frames]
        turn: Any = {"role": "user", "content": [images[0], "count", images[1]]}
        running = client.generate(messages=[turn], max_tokens=3)
        next(running)
        (prepared,) = [one for one in door.actors.prepared if one.visuals]
        assert prepared.turns is not None
        parts = [TurnPart("image"), TurnPart("text", "count"), TurnPart("image")]
        assert prepared.turns[0].parts == parts
        slots = [visual.frames[0].slot for visual in prepared.visuals]
        assert running.text() == "0 1 2 "
    assert [slot.size for slot in slots] == [100, 100]
    until(lambda: held(door) == 0)
    done = running.done
    assert done is not None
    assert done.images is not None
    told = done.images
    assert (told.count, told.tokens, told.cached) == (2, 12, 1)
    assert (told.decode_ms, told.resize_ms, told.engine_ms) == (1.0, 2.0, 3.0)
    until(lambda: ended)
    assert ended[-1].images == told
    assert ended[-1].images_s > 0
    totals = door.totals()
    names = ("images", "images_cached", "image_tokens")
    assert tuple(totals[name] for name in names) == (2, 1, 12)


@pytest.mark.parametrize("end", ["cancel", "bye", "deadline", "fail"])
def test_whatever_ends_a_request_frees_its_pictures(end: str, door: Harness) -> None:
    word = "fail" if end == "fail" else "hang"
    with raw_client(door.path) as client:
        greet(client)
        more = {"deadline_s": 0.3} if end == "deadline" else {}
        say(client, asked(word, 1, **more), bytes(100))
        assert hear(client)["t"] == "accepted"
        if end == "cancel":
            assert held(door) > 0
            say(client, {"t": "cancel", "id": "g"})
        if end == "bye":
            say(client, {"t": "bye"})
        else:
            assert hear(client)["t"] in {"done", "error"}
        until(lambda: held(door) == 0)


def test_requests_that_end_before_their_pictures_are_taken_hold_nothing(door: Harness) -> None:
    def ask_and_cancel() -> int:
        requests, number = door.door._requests, door.door.sessions.all()[0].connection
        ask, cancel = (msgspec.msgpack.encode(one) for one in (asked("hang", 1), CANCEL))
        for _ in range(100):
            requests.handle(Received(number, False, ask, 2, [memoryview(bytes(100))]))
            requests.handle(Received(number, False, cancel, 1))
        return len(requests._filling)

    with raw_client(door.path) as client:
        greet(client)
        until(lambda: door.sessions() == 1)
        assert door.on_loop(ask_and_cancel) < 10


@pytest.mark.parametrize("backend", BACKENDS, ids=["asyncio", "uvloop"])
def test_pictures_are_taken_without_a_wait(
    backend: dict[str, Any], arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door, "_TICK_S", 60.0)
    with (
        running_door(backend, arena=arena, **LIMITS) as door,
        raw_client(door.path) as client,
    ):
        greet(client)
        for frames in ([1], [1, 2, 3]) * 5:
            asking = {"t": "tokenize", "id": "t", "messages": turns("Hi", *frames)}
            say(client, asking, *[bytes(100)] * len(frames))
            assert hear(client)["t"] == "tokens"


def test_an_image_that_fails_later_is_named_as_the_client_has_it(door: Harness) -> None:
    with raw_client(door.path) as client:
        greet(client)
        say(client, asked("blind", 2, 1), bytes(100), bytes(100))
        assert hear(client)["t"] == "accepted"
        error = hear(client)
        assert (error["code"], error["field"]) == ("image_invalid", "messages[0].content[1]")


def test_what_is_refused_holds_nothing(door: Harness) -> None:
    with raw_client(door.path) as client:
        greet(client)
        say(client, asked("hang", 1), bytes(100))
        assert hear(client)["t"] == "accepted"
        before = held(door)
        say(client, asked("count", 1), bytes(100))
        assert hear(client)["code"] == "duplicate_id"
        say(client, {**asked("count", 1), "id": "h"}, bytes(99))
        error = hear(client)
        assert (error["id"], error["code"]) == ("h", "image_invalid")
        assert error["field"] == "messages[0].content[0]"
        say(client, {**asked("count", 1), "id": "h"}, bytes(100), b"one more")
        error = hear(client)
        assert (error["id"], error["code"], error["field"]) == ("h", "unsupported_option", "frames")
        assert held(door) == before
        say(client, {"t": "bye"})
        until(lambda: held(door) == 0)


def test_tokens_of_pictures_can_be_asked_for(door: Harness) -> None:
    with Client(door.path) as client:
        picture = Image(memoryview(bytes(100)).cast("B", (10, 10)), "mono8")
        client.tokenize(messages=[{"role": "user", "content": ["Hi", picture]}])
    until(lambda: held(door) == 0)


def test_the_asyncio_client_sends_pictures_too(door: Harness) -> None:
    async def ask() -> tuple[str, int]:
        async with AsyncClient(door.path) as client:
            image = Image(memoryview(bytes(100)).cast("B", (10, 10)), "mono8")
            turn = {"role": "user", "content": ["count", image, Video([image, image], [0, 0.5])]}
            await client.tokenize(messages=[turn])
            running = await client.generate(messages=[turn], max_tokens=2)
            text = await running.text()
            assert running.done is not None
            assert running.done.images is not None
            return text, running.done.images.count

    assert asyncio.run(ask()) == ("0 1 ", 2)


def test_a_delimiter_is_no_frame(door: Harness) -> None:
    with raw_client(door.path, zmq.REQ) as client:
        greet(client)
        say(client, {"t": "tokenize", "id": "t", "messages": turns("Hi", 1)}, bytes(100))
        assert hear(client)["t"] == "tokens"
        say(client, {"t": "tokenize", "id": "t", "messages": turns("Hi", 2)}, bytes(100))
        assert hear(client)["field"] == "messages[0].content[0].frame"
        say(client, {"t": "bye"})


def test_a_frame_that_is_too_large_is_answered_and_a_huge_one_costs_the_connection(
    door: Harness,
) -> None:
    with raw_client(door.path) as client:
        greet(client)
        say(client, asked("count", 1), bytes(LIMITS["image_bytes"] + 1))
        assert hear(client)["code"] == "image_too_large"
        say(client, asked("count", 1), bytes(3 << 20))
        client.setsockopt(zmq.RCVTIMEO, 300)
        with pytest.raises(zmq.Again):
            client.recv()


def test_a_message_as_large_as_a_picture_is_refused_unread(arena: Arena) -> None:
    large = {**LIMITS, "image_bytes": 1 << 17, "frame_bytes": 1000}
    with running_door(arena=arena, **large) as door, raw_client(door.path) as client:
        greet(client)
        for size, request_id in ((1500, "t"), (100_000, "")):
            say(client, {"t": "tokenize", "id": "t", "text": "x" * size})
            error = hear(client)
            assert (error["code"], error.get("id", "")) == ("message_too_large", request_id)


def test_the_client_does_not_send_what_costs_the_connection(door: Harness) -> None:
    large, half = (
        Image(memoryview(bytes(size << 7)).cast("B", (size, 1 << 7)), "mono8")
        for size in (1024, 512)
    )
    refused = (([large], ImageTooLarge), ([half] * 4, InvalidValue), ([half] * 2, ImageTooLarge))
    with Client(door.path) as client:
        for content, error in refused:
            with pytest.raises(error):
                client.generate(messages=[{"role": "user", "content": content}])
        assert client.status().clients > 0


def test_a_model_that_sees_nothing_says_so() -> None:
    with running_door() as door, raw_client(door.path) as client:
        welcome = greet(client)
        assert "images" not in welcome["features"]
        assert "images" not in welcome["limits"]
        assert welcome["limits"]["frames"] == 1
        say(client, asked("count", 1), bytes(100))
        error = hear(client)
        assert (error["code"], error["field"]) == ("unsupported_option", "messages[0].content[0]")
        image = Image(memoryview(b"1").cast("B", (1, 1)), "mono8")
        with Client(door.path) as other, pytest.raises(UnsupportedOption):
            other.generate(messages=[{"role": "user", "content": [image]}])
