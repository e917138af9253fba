from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.daemon.door.zmtp import (
    DELIMITER,
    GREETING,
    Event,
    Limits,
    Message,
    Ready,
    Refusal,
    Reply,
    Zmtp,
    header,
)

LIMITS = Limits(frame_bytes=300_000, message_bytes=350_000, frames=3)


def command(name: bytes, rest: bytes = b"") -> bytes:
    body = bytes([len(name)]) + name + rest
    return bytes([4, len(body)]) + body


def said(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def frame(data: bytes, *, more: bool = False) -> bytes:
    head = header(len(data))
    return bytes([head[0] | more]) + head[1:] + data


def greeting(major: int = 3, minor: int = 1, mechanism: bytes = b"NULL", padding: int = 1) -> bytes:
    start = b"\xff" + padding.to_bytes(8, "big") + b"\x7f" + bytes([major, minor])
    return start + mechanism.ljust(20, b"\0") + b"\1" + bytes(31)


READY = command(b"READY", said(b"Socket-Type", b"DEALER") + said(b"Identity", b"\0abcd"))
PING = command(b"PING", b"\0\x64context")
PONG = Reply(command(b"PONG", b"context"))
OURS = Reply(command(b"READY", said(b"Socket-Type", b"ROUTER") + said(b"Identity", b"")))
BEGUN: list[Event] = [OURS, Ready()]


def events_of(data: bytes, cuts: list[int] | None = None, *, in_place: bool = True) -> list[Event]:
    """All that comes of bytes that arrive in parts, cut at these places."""
    zmtp, found = Zmtp(LIMITS), list[Event]()
    for start, end in pairwise(
        [0, *sorted(cut % (len(data) + 1) for cut in cuts or []), len(data)]
    ):
        part = data[start:end]
        room = zmtp.room()
        if room is not None and in_place:
            size = min(len(room), len(part))
            room[:size] = part[:size]
            zmtp.filled(size)
            part = part[size:]
        zmtp.receive_data(part)
        while (event := zmtp.next_event()) is not None:
            found.append(event)
            assert zmtp.held < LIMITS.message_bytes + len(data)
    return found


def test_our_greeting_is_whole_and_of_version_3() -> None:
    assert len(GREETING) == 64
    assert greeting()[:32] + bytes(32) == GREETING


@pytest.mark.parametrize("minor", [0, 1])
@pytest.mark.parametrize("padding", [0, 1, 9, 256])
def test_a_dealer_is_heard_whatever_it_calls_itself(minor: int, padding: int) -> None:
    data = greeting(minor=minor, padding=padding) + READY + frame(b"hi") + PING
    assert events_of(data) == [*BEGUN, Message([b"hi"], 1), PONG]


@pytest.mark.parametrize("kind", [b"DEALER", b"REQ"])
def test_names_of_properties_have_no_case(kind: bytes) -> None:
    ready = command(b"READY", said(b"x-mine", b"") + said(b"SOCKET-type", kind))
    assert events_of(greeting() + ready) == BEGUN


def test_a_ping_is_answered_between_the_frames_of_a_message() -> None:
    data = frame(b"a", more=True) + PING + frame(b"b" * 100_000, more=True) + PING + frame(b"c")
    assert events_of(greeting() + READY + data) == [
        *BEGUN,
        PONG,
        PONG,
        Message([b"a", b"b" * 100_000, b"c"], 3),
    ]


def test_of_many_frames_the_first_are_kept_and_all_are_counted() -> None:
    data = DELIMITER + frame(b"x", more=True) * 999 + frame(b"y")
    assert events_of(greeting() + READY + data)[2:] == [Message([b"", b"x", b"x"], 1001)]


WRONG = {
    "it does not speak ZMTP": b"\x01\x00",
    "speaks ZMTP 1": b"\xff" + bytes(7) + b"\x06\x00abc",
    "speaks ZMTP 2": b"\xff" + bytes(8) + b"\x7f\x01\x05",
    "mechanism": greeting(mechanism=b"PLAIN"),
    "before READY": greeting() + frame(b"hi"),
    "another command": greeting() + command(b"HELLO"),
    "neither": greeting() + command(b"READY", said(b"Socket-Type", b"SUB")),
    "properties cannot": greeting() + command(b"READY", b"\x0bSocket-Type\x00\x00\x00\xffDEALER"),
    "flags": greeting() + READY + b"\x08\x00",
    "command is too": greeting() + READY + b"\x06" + (1 << 40).to_bytes(8, "big"),
    "without a name": greeting() + READY + b"\x04\x00",
    "mean nothing": greeting() + READY + b"\x05\x01\x00",
    "told of an error": greeting() + READY + command(b"ERROR", b"\x00"),
    "PING of": greeting() + READY + command(b"PING", bytes(19)),
    "too many commands": greeting() + READY + command(b"HM") * 65,
    "a frame is too": greeting() + READY + b"\x02" + (1 << 63).to_bytes(8, "big"),
    "a message is too": greeting() + READY + frame(bytes(200_000), more=True) * 2,
    "too many frames": greeting() + READY + frame(b"", more=True) * 1028,
}


@pytest.mark.parametrize("reason", WRONG)
def test_who_does_not_keep_to_it_is_left_and_nothing_is_kept(reason: str) -> None:
    zmtp = Zmtp(LIMITS)
    zmtp.receive_data(WRONG[reason])
    found = []
    while (event := zmtp.next_event()) is not None:
        found.append(event)
    (refusal,) = [one for one in found if isinstance(one, Refusal)]
    assert found[-1] is refusal
    assert reason in refusal.reason
    assert not any(isinstance(one, Message) for one in found)
    zmtp.receive_data(greeting() + READY + frame(b"hi"))
    assert (zmtp.next_event(), zmtp.room()) == (None, None)


def test_a_large_frame_is_announced_without_memory_and_comes_in_place() -> None:
    zmtp = Zmtp(LIMITS)
    zmtp.receive_data(greeting() + READY + frame(bytes(299_999) + b"x")[:20_000])
    while zmtp.next_event() is not None:
        pass
    room = zmtp.room()
    assert room is not None
    assert zmtp.held == 20_000 - 9
    room[-1:] = b"x"
    zmtp.filled(len(room))
    message = zmtp.next_event()
    assert isinstance(message, Message)
    (body,) = message.frames
    assert isinstance(body, memoryview)
    assert body.obj is room.obj, "no copy is made"
    assert zmtp.held == 0


PIECES = st.sampled_from(
    [
        READY,
        PING,
        command(b"HM"),
        frame(b""),
        frame(b"a" * 300),
        frame(b"b" * 9000, more=True),
        frame(b"c" * 10_000),
        DELIMITER,
        b"\x02" + (19_999).to_bytes(8, "big"),
        bytes(10_000),
    ]
) | st.binary(max_size=12)


@given(
    start=st.sampled_from([b"", greeting(), greeting() + READY, greeting(minor=0) + READY]),
    rest=st.lists(PIECES, max_size=8).map(b"".join),
    cuts=st.lists(st.integers(0, 1 << 20), max_size=12),
    in_place=st.booleans(),
)
def test_however_bytes_are_split_the_events_are_the_same(
    start: bytes, rest: bytes, cuts: list[int], *, in_place: bool
) -> None:
    whole = events_of(start + rest)
    assert events_of(start + rest, cuts, in_place=in_place) == whole
    assert events_of(start + rest[:600], list(range(700))) == events_of(start + rest[:600])
