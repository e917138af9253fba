from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import structs
from PIL import Image

from hearth.actors.arena import Arena
from hearth.daemon.door.pictures import Pictures, check_frames
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.wire import decode, visuals_of
from hearth.runtime.errors import HearthError
from hearth.runtime.images import Picture
from hearth_client.protocol import ClientMessage, Generate
from tests.clients.vectors import load

SETTINGS = DoorSettings(images_per_request=4, image_bytes=1000)
RAW = {"type": "image", "encoding": "rgb8", "width": 2, "height": 1}
AT = "messages[0].content"


def file(kind: str, width: int = 3, height: int = 2) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height)).save(data, kind)
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
