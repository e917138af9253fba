from __future__ import annotations

import asyncio
import io
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from msgspec import structs
from PIL import Image as PILImage

from hearth.actors.arena import Arena
from hearth.daemon.door import front_door
from hearth.daemon.door.finished import FinishedRequest
from hearth.daemon.door.pictures import Pictures, check_frames, visuals_of
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import Received
from hearth.daemon.door.wire import decode
from hearth.runtime.errors import HearthError
from hearth.runtime.images import Picture
from hearth.runtime.text.conversation import TurnPart
from hearth_client import (
    AsyncClient,
    Client,
    Image,
    ImageTooLarge,
    InvalidValue,
    UnsupportedOption,
    Video,
)
from hearth_client.protocol import ClientMessage, Generate
from tests.clients.vectors import load
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

SETTINGS = DoorSettings(images_per_request=4, image_bytes=1000)
RAW = {"type": "image", "encoding": "rgb8", "width": 2, "height": 1}
AT = "messages[0].content"


def file(kind: str, width: int = 3, height: int = 2) -> bytes:
    data = io.BytesIO()
    PILImage.new("RGB", (width, height)).save(data, kind)
    return data.getvalue()


def image(frame: int = 1, **more: Any) -> dict[str, Any]:
    return {"type": "image", "frame": frame, **more}


def asked(*parts: dict[str, Any]) -> Generate:
    turns = [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}]
    message = decode(msgspec.msgpack.encode({"t": "generate", "id": "a", "messages": turns}))
    assert isinstance(message, Generate)
    return message


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create("test", 4096)
    yield made
    made.close()


def taken(pictures: Pictures, message: Any, *frames: bytes, own: int = 0, **settings: Any) -> Any:
    views = [memoryview(frame) for frame in frames]
    limits = structs.replace(SETTINGS, **settings)
    check_frames(message, 1 + len(views), limits.images_per_request)
    slots = pictures.reserve(views, own, 0.75)
    filling = pictures.fill(visuals_of(message.messages), views, slots, limits.image_bytes)
    try:
        while True:
            next(filling)
    except StopIteration as done:
        return done.value, slots
    except HearthError:
        pictures.free(slots)
        raise


def refusal(arena: Arena, message: Any, *frames: bytes, **more: Any) -> tuple[str, str | None]:
    pictures = Pictures(arena)
    with pytest.raises(HearthError) as caught:
        taken(pictures, message, *frames, **more)
    assert pictures.bytes == 0
    return caught.value.code, caught.value.field


@pytest.mark.parametrize(
    "vector", [v for v in load("requests") if "frames" in v], ids=lambda vector: vector["name"]
)
def test_the_vectors_frames_are_copied_to_their_places(vector: Any, arena: Arena) -> None:
    pictures = Pictures(arena)
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]
    message: Any = msgspec.msgpack.decode(bytes.fromhex(vector["hex"]), type=ClientMessage)
    visuals, slots = taken(pictures, message, *frames)
    assert [bytes(arena.view(slot)) for slot in slots] == frames
    parts = [part for part in vector["message"]["messages"][0]["content"] if part["type"] != "text"]
    assert len(visuals) == len(parts)
    for visual, part in zip(visuals, parts, strict=True):
        shown = part.get("frames", [part])
        assert visual.times == [one["time_s"] for one in shown if "time_s" in one]
        for found, said in zip(visual.frames, shown, strict=True):
            assert found.slot == slots[said["frame"] - 1]
            assert found.picture.kind == said.get("format", said.get("encoding"))
            size = found.picture.width, found.picture.height
            assert size == (said.get("width", 2), said.get("height", 1))
    pictures.free(slots)
    assert pictures.bytes == 0


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "gif"])
def test_a_file_says_its_size_itself(kind: str, arena: Arena) -> None:
    visuals, _ = taken(Pictures(arena), asked(image(format=kind)), file(kind))
    assert visuals[0].frames[0].picture == Picture(kind, 3, 2)  # type: ignore[arg-type]


def test_a_frame_may_be_named_twice_and_is_copied_once(arena: Arena) -> None:
    pictures, png = Pictures(arena), file("png")
    visuals, slots = taken(pictures, asked(image(format="png"), image(format="png")), png)
    assert len(slots) == 1
    assert visuals[0] == visuals[1]


@pytest.mark.parametrize(
    ("parts", "frames", "code", "field"),
    [
        ([image(2, format="png")], 1, "invalid_value", f"{AT}[1].frame"),
        ([image(1, format="png")], 0, "invalid_value", f"{AT}[1].frame"),
        ([image(2, format="png")], 2, "unsupported_option", "frames"),
        ([], 1, "unsupported_option", "frames"),
        ([image(1, format="png")] * 5, 1, "invalid_value", f"{AT}[5]"),
        ([image(1, format="png")], 9, "unsupported_option", "frames"),
    ],
)
def test_frames_and_parts_must_belong_together(
    parts: Any, frames: int, code: str, field: str, arena: Arena
) -> None:
    assert refusal(arena, asked(*parts), *[file("png")] * frames) == (code, field)


def test_messages_without_pictures_have_no_frames() -> None:
    for message in ({"t": "lease"}, {"t": "detokenize", "id": "a", "tokens": []}):
        decoded = decode(msgspec.msgpack.encode(message))
        check_frames(decoded, 1, 4)
        with pytest.raises(HearthError) as caught:
            check_frames(decoded, 2, 4)
        assert (caught.value.code, caught.value.field) == ("unsupported_option", "frames")


def test_a_model_that_sees_nothing_refuses_the_part(arena: Arena) -> None:
    wrong = asked(image(format="png"))
    assert refusal(arena, wrong, file("png"), images_per_request=0) == (
        "unsupported_option",
        f"{AT}[1]",
    )


@pytest.mark.parametrize(
    ("part", "frame", "code"),
    [
        (image(format="png"), file("jpeg"), "image_invalid"),
        (image(format="jpeg"), b"no picture", "image_invalid"),
        (image(format="png"), b"", "image_invalid"),
        (image(format="png"), file("png")[:20], "image_invalid"),
        (image(format="png"), file("png") + bytes(1000), "image_too_large"),
        (image(format="png"), file("png", 12_000, 1)[:16] + b"\0\1\0\0" * 4, "image_too_large"),
        (image(encoding="rgb8", width=2, height=1), bytes(5), "image_invalid"),
        (image(encoding="rgb8", width=2, height=1), bytes(7), "image_invalid"),
        (image(encoding="rgb8", width=2, height=1, step=5), bytes(5), "image_invalid"),
        (image(encoding="nv12", width=3, height=2), bytes(9), "image_invalid"),
        (image(encoding="rgb8", width=65535, height=65535), bytes(9), "image_too_large"),
    ],
)
def test_what_is_not_as_it_says_is_refused_at_once(
    part: Any, frame: bytes, code: str, arena: Arena
) -> None:
    assert refusal(arena, asked(part), frame) == (code, f"{AT}[1]")


def test_rows_of_raw_pixels_may_have_gaps(arena: Arena) -> None:
    part = image(encoding="rgb8", width=2, height=3, step=8)
    visuals, _ = taken(Pictures(arena), asked(part), bytes(24))
    assert visuals[0].frames[0].picture == Picture("rgb8", 2, 3, 8)


def test_a_fault_in_a_video_names_its_frame(arena: Arena) -> None:
    frames = [{**RAW, "frame": n, "time_s": n} for n in (1, 2)]
    video = {"type": "video", "frames": [{k: f[k] for k in f if k != "type"} for f in frames]}
    refused = refusal(arena, asked(video), bytes(6), bytes(5))
    assert refused == ("image_invalid", f"{AT}[1].frames[1]")


def test_what_all_clients_have_is_bounded(arena: Arena) -> None:
    pictures, png = Pictures(arena), file("png")
    part = image(encoding="mono8", width=1000, height=1)
    kept = [taken(pictures, asked(part), bytes(1000))[1] for _ in range(3)]
    with pytest.raises(HearthError) as caught:
        taken(pictures, asked(part), bytes(1000))
    assert (caught.value.code, caught.value.field) == ("queue_full", "images_in_flight_bytes")
    with pytest.raises(HearthError) as caught:
        taken(pictures, asked(image(format="png")), png, own=2600)
    assert (caught.value.code, caught.value.field) == ("too_many_requests", "client_queue_share")
    pictures.free(kept.pop())
    pictures.free(kept.pop())
    taken(pictures, asked(part), bytes(1000))


def test_what_would_never_fit_is_not_told_to_come_again(arena: Arena) -> None:
    parts = [image(n, encoding="mono8", width=1000, height=1) for n in (1, 2, 3, 4)]
    refused = refusal(arena, asked(*parts), *[bytes(1000)] * 4)
    assert refused == ("image_too_large", "images_in_flight_bytes")


def test_pieces_between_others_that_are_too_small_are_no_room(arena: Arena) -> None:
    pictures = Pictures(arena)
    small = image(encoding="mono8", width=900, height=1)
    kept = [taken(pictures, asked(small), bytes(900))[1] for _ in range(4)]
    pictures.free(kept[0])
    pictures.free(kept[2])
    before = pictures.bytes
    with pytest.raises(HearthError) as caught:
        taken(pictures, asked(image(encoding="mono8", width=1000, height=1)), bytes(1000))
    assert caught.value.code == "queue_full"
    assert pictures.bytes == before


SIZE = 1 << 20
CANCEL = {"t": "cancel", "id": "g"}
LIMITS: dict[str, Any] = {"images_per_request": 3, "image_bytes": 1 << 16, "image_tokens": 64}
LIMITS["images_in_flight_bytes"] = 100_000


@pytest.fixture(scope="module")
def door_arena() -> Iterator[Arena]:
    made = Arena.create("test", SIZE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ended() -> list[FinishedRequest]:
    return []


@pytest.fixture(scope="module")
def door(door_arena: Arena, ended: list[FinishedRequest]) -> Iterator[Harness]:
    with running_door(arena=door_arena, listeners=[ended.append], **LIMITS) as harness:
        yield harness


def turns(word: str, *frames: int) -> list[dict[str, Any]]:
    parts = [
        {"type": "image", "frame": frame, "encoding": "mono8", "width": 10, "height": 10}
        for frame in frames
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": word}]}]


def request_with(word: str, *frames: int, **more: Any) -> dict[str, Any]:
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
        assert prepared.chat is not None
        parts = [TurnPart("image"), TurnPart("text", "count"), TurnPart("image")]
        assert prepared.chat.turns[0].parts == parts
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
        say(client, request_with(word, 1, **more), bytes(100))
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
        ask, cancel = (msgspec.msgpack.encode(one) for one in (request_with("hang", 1), CANCEL))
        sent = []
        for _ in range(100):
            picture = memoryview(bytes(100))
            sent.append(weakref.ref(picture))
            requests.handle(Received(number, False, ask, 2, [picture]))
            requests.handle(Received(number, False, cancel, 1))
        return sum(one() is not None for one in sent)

    with raw_client(door.path) as client:
        greet(client)
        until(lambda: door.sessions() == 1)
        assert door.on_loop(ask_and_cancel) < 10


@pytest.mark.parametrize("backend", BACKENDS, ids=["asyncio", "uvloop"])
def test_pictures_are_taken_without_a_wait(
    backend: dict[str, Any], door_arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door, "_TICK_S", 60.0)
    with (
        running_door(backend, arena=door_arena, **LIMITS) as door,
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
        say(client, request_with("blind", 2, 1), bytes(100), bytes(100))
        assert hear(client)["t"] == "accepted"
        error = hear(client)
        assert (error["code"], error["field"]) == ("image_invalid", "messages[0].content[1]")


def test_what_is_refused_holds_nothing(door: Harness) -> None:
    with raw_client(door.path) as client:
        greet(client)
        say(client, request_with("hang", 1), bytes(100))
        assert hear(client)["t"] == "accepted"
        before = held(door)
        say(client, request_with("count", 1), bytes(100))
        assert hear(client)["code"] == "duplicate_id"
        say(client, {**request_with("count", 1), "id": "h"}, bytes(99))
        error = hear(client)
        assert (error["id"], error["code"]) == ("h", "image_invalid")
        assert error["field"] == "messages[0].content[0]"
        say(client, {**request_with("count", 1), "id": "h"}, bytes(100), b"one more")
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
        say(client, request_with("count", 1), bytes(LIMITS["image_bytes"] + 1))
        assert hear(client)["code"] == "image_too_large"
        say(client, request_with("count", 1), bytes(3 << 20))
        client.setsockopt(zmq.RCVTIMEO, 300)
        with pytest.raises(zmq.Again):
            client.recv()


def test_a_message_as_large_as_a_picture_is_refused_unread(door_arena: Arena) -> None:
    large = {**LIMITS, "image_bytes": 1 << 17, "frame_bytes": 1000}
    with running_door(arena=door_arena, **large) as door, raw_client(door.path) as client:
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
        say(client, request_with("count", 1), bytes(100))
        error = hear(client)
        assert (error["code"], error["field"]) == ("unsupported_option", "messages[0].content[0]")
        image = Image(memoryview(b"1").cast("B", (1, 1)), "mono8")
        with Client(door.path) as other, pytest.raises(UnsupportedOption):
            other.generate(messages=[{"role": "user", "content": [image]}])
