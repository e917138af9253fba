"""Vectors of the wire protocol, read and written by the daemon's own ZMTP, and by libzmq."""

import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from hearth.daemon.door.zmtp import (
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
from tests.clients.vectors import load

VECTORS = {vector["name"]: vector for vector in load("zmtp")}
GOOD = [name for name, vector in VECTORS.items() if "means" in vector]
MALFORMED = [name for name, vector in VECTORS.items() if "close" in vector]
LIMITS = Limits(frame_bytes=16 << 20, message_bytes=16 << 20, frames=1)
"""Limits for a client that the specification names; an answer has one frame."""


def bytes_of(name: str) -> bytes:
    return bytes.fromhex(VECTORS[name]["hex"])


BEFORE = {
    "nothing": b"",
    "greeting": bytes_of("greeting of a client"),
    "ready": bytes_of("greeting of a client") + bytes_of("READY of a client"),
}
"""Bytes that bring the reading side to where a malformed vector begins."""
CLOSES = {
    "signature": ("does not speak ZMTP", "speaks ZMTP 1"),
    "version": ("speaks ZMTP 2",),
    "mechanism": ("mechanism",),
    "handshake": ("before READY",),
    "properties": ("neither a DEALER", "properties cannot"),
    "flags": ("flags",),
    "size": ("too large",),
    "frames": ("too many frames",),
    "command": ("without a name", "PING of a wrong size", "too many commands"),
    "error": ("before READY", "told of an error"),
}


def events_of(data: bytes, limits: Limits) -> list[Event]:
    zmtp, found = Zmtp(limits), list[Event]()
    zmtp.receive_data(data)
    while (event := zmtp.next_event()) is not None:
        found.append(event)
    return found


def answer_to(stage: str, data: bytes) -> list[Event]:
    """Events behind the handshake's, of bytes that come at this stage."""
    before = len(events_of(BEFORE[stage], LIMITS))
    return events_of(BEFORE[stage] + data, LIMITS._replace(frames=8))[before:]


def command(name: str, rest: bytes = b"") -> bytes:
    """A command as RFC 37 writes it."""
    body = bytes((len(name),)) + name.encode() + rest
    if len(body) < 256:
        return bytes((4, len(body))) + body
    return b"\x06" + len(body).to_bytes(8, "big") + body


def written(means: dict[str, Any]) -> bytes:
    """Bytes of a command or a message by its meaning."""
    match means:
        case {"properties": properties}:
            pairs = [(key.encode(), value.encode()) for key, value in properties.items()]
            parts = (bytes((len(k),)) + k + len(v).to_bytes(4, "big") + v for k, v in pairs)
            return command(means["command"], b"".join(parts))
        case {"ttl": ttl, "context": context}:
            return command("PING", ttl.to_bytes(2, "big") + bytes.fromhex(context))
        case {"context": context}:
            return command("PONG", bytes.fromhex(context))
        case {"reason": reason}:
            return command("ERROR", bytes((len(reason),)) + reason.encode())
    frames = [bytes.fromhex(frame) for frame in means["message"]]
    heads = [header(len(frame)) for frame in frames]
    last = len(frames) - 1
    return b"".join(
        bytes((head[0] | (at < last),)) + head[1:] + frame
        for at, (head, frame) in enumerate(zip(heads, frames, strict=True))
    )


@pytest.mark.parametrize("name", GOOD)
def test_bytes_are_read_as_they_are_meant(name: str) -> None:
    means, data = VECTORS[name]["means"], bytes_of(name)
    ready = VECTORS["READY of the daemon"]["hex"]
    expected: list[Event]
    match means:
        case {"greeting": {"major": major, "minor": minor, "mechanism": mechanism}}:
            assert (data[10], data[11], data[12:32].rstrip(b"\0")) == (
                major,
                minor,
                mechanism.encode(),
            )
            stage, expected = "nothing", [Reply(bytes.fromhex(ready))]
        case {"command": "READY", "properties": {"Socket-Type": "DEALER"}}:
            stage, expected = "greeting", [Ready()]
        case {"command": "READY"}:
            # The daemon is a ROUTER and takes none for its peer; all up to that is read.
            stage, expected = "greeting", [Refusal("it is neither a DEALER nor a REQ")]
        case {"command": "PING", "context": context}:
            pong = {"command": "PONG", "context": context}
            stage, expected = "ready", [Reply(written(pong))]
            assert any(vector.get("means") == pong for vector in VECTORS.values())
        case {"command": "ERROR"}:
            stage, expected = "ready", [Refusal("it told of an error")]
        case {"command": _}:
            stage, expected = "ready", []
        case {"message": frames}:
            message = Message([bytes.fromhex(frame) for frame in frames], len(frames))
            stage, expected = "ready", [message]
    assert answer_to(stage, data) == expected


@pytest.mark.parametrize("name", [n for n in GOOD if "greeting" not in VECTORS[n]["means"]])
def test_meanings_are_written_as_these_bytes(name: str) -> None:
    data = bytes_of(name)
    known = VECTORS[name]["means"]
    if name == "a command that nobody knows":
        assert data == command("WEATHER", b"rain")
    elif name == "a short answer in a long frame":
        assert data == b"\x02" + (len(data) - 9).to_bytes(8, "big") + data[9:]
    else:
        assert data == written(known)


def test_the_daemon_sends_its_greeting() -> None:
    assert bytes_of("greeting of the daemon") == GREETING


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("whole", [True, False])
def test_malformed_bytes_close_the_connection_and_give_nothing(name: str, *, whole: bool) -> None:
    vector, zmtp, found = VECTORS[name], Zmtp(LIMITS), list[Event]()
    data = BEFORE[vector["after"]] + bytes_of(name)
    for part in [data] if whole else [data[at : at + 1] for at in range(len(data))]:
        zmtp.receive_data(part)
        while (event := zmtp.next_event()) is not None:
            found.append(event)
    *_, refusal = found
    assert isinstance(refusal, Refusal)
    assert any(reason in refusal.reason for reason in CLOSES[vector["close"]])
    assert not any(isinstance(event, Message) for event in found)


def test_every_stage_and_reason_has_a_malformed_vector() -> None:
    assert {VECTORS[name]["close"] for name in MALFORMED} == set(CLOSES)
    assert {VECTORS[name]["after"] for name in MALFORMED} == set(BEFORE)


@pytest.mark.parametrize(
    "name", ["a request with a picture's frame", "an answer of 327 bytes in a long frame"]
)
def test_libzmq_takes_what_a_client_sends_and_gives_it_back(name: str, tmp_path: Path) -> None:
    path, pong = tmp_path / "router", bytes_of("PONG of the daemon to it")
    frames = [bytes.fromhex(frame) for frame in VECTORS[name]["means"]["message"]]
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        socket.socket(socket.AF_UNIX) as client,
        client.makefile("rb") as received,
    ):
        router.linger = 0
        router.bind(f"ipc://{path}")
        client.settimeout(10)
        client.connect(str(path))
        client.sendall(BEFORE["ready"])
        greeting = received.read(64)
        assert greeting[:1] + greeting[9:11] == b"\xff\x7f\x03"
        assert received.read(len(bytes_of("READY of the daemon")))[2:8] == b"\x05READY"
        client.sendall(bytes_of("PING of a client") + bytes_of(name))
        assert received.read(len(pong)) == pong
        assert router.poll(10_000)
        peer, *taken = router.recv_multipart()
        assert taken == frames
        router.send_multipart([peer, *frames])
        assert received.read(len(bytes_of(name))) == bytes_of(name)
