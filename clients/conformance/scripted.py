"""A ROUTER that says what a scene tells it to, where no real daemon would."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import zmq

from clients.conformance.driving import Driver

if TYPE_CHECKING:
    from typing_extensions import Self

Message: TypeAlias = dict[str, Any]
FEATURES = ("reasoning", "tool_calls", "end_details")
LIMITS: dict[str, Any] = {
    "frame_bytes": 4096,
    "frames": 4,
    "requests_per_client": 64,
    "prompt_tokens": 2000,
    "total_tokens": 4096,
    "queued_requests": 256,
    "queued_tokens": 65536,
    "lease_s": 30.0,
    "images": 3,
    "image_bytes": 2048,
    "request_image_bytes": 4096,
    "image_tokens": 256,
}
USAGE = {"prompt_tokens": 9, "completion_tokens": 2}


def welcome(**fields: Any) -> Message:
    """The answer to `hello`."""
    return {
        "t": "welcome",
        "proto": 1,
        "server": "scripted 1",
        "limits": LIMITS,
        "features": ["images", *FEATURES],
        "model": "none",
        "epoch": "first",
        **fields,
    }


def done(**fields: Any) -> Message:
    """The end of a reply that came."""
    return {"t": "done", "reason": "stop", "usage": USAGE, **fields}


def packed(value: Any, bits: int = 0) -> bytes:
    """Pack as msgpack, with every head of so many bits, 8, 16 or 32; 0 for the shortest ones."""
    if not bits:
        return msgspec.msgpack.encode(value)
    size = {8: 0, 16: 1, 32: 2}[bits]
    of_many = max(size - 1, 0)  # Maps and lists have no head of 8 bits.
    if isinstance(value, dict):
        head = struct.pack(">B" + "HI"[of_many], 0xDE + of_many, len(value))
        return head + b"".join(packed(k, bits) + packed(v, bits) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        head = struct.pack(">B" + "HI"[of_many], 0xDC + of_many, len(value))
        return head + b"".join(packed(one, bits) for one in value)
    if isinstance(value, (str, bytes)):
        first, data = (0xD9, value.encode()) if isinstance(value, str) else (0xC4, value)
        return struct.pack(">B" + "BHI"[size], first + size, len(data)) + data
    if isinstance(value, int) and not isinstance(value, bool):
        return struct.pack(">Bq", 0xD3 if bits == 16 else 0xCF, value)
    return msgspec.msgpack.encode(value)


class Peer:
    """The driver's connection with a scripted ROUTER, and what the latter says on it.

    `broken` are requests that a client gives up by itself, and may cancel; `left` is set where it
    may say `bye` to its session.
    """

    def __init__(self, path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.address = f"ipc://{path}"
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(self.address)
        self._routing_id = b""
        self.frames: list[bytes] = []
        self.broken: set[str] = set()
        self.left = False

    def take(self, kind: str) -> Message:
        """The next message of this kind; its frames are in `frames`, leases are answered."""
        deadline = time.monotonic() + Driver.patience_s
        while True:
            message = self.next(deadline)
            assert message is not None, f"no {kind} came in time"
            if message["t"] == kind:
                return message
            if message["t"] == "lease":
                self.say(t="leased", seconds=30.0)
                continue
            given_up = message["t"] == "cancel" and message["id"] in self.broken
            given_up = given_up or (self.left and message["t"] == "bye")
            assert given_up, f"{message} came instead of {kind}"

    def next(self, deadline: float) -> Message | None:
        """The next message; None when none has come by then."""
        left = deadline - time.monotonic()
        if not self._socket.poll(max(0, int(left * 1000))):
            return None
        self._routing_id, data, *self.frames = self._socket.recv_multipart()
        message: Message = msgspec.msgpack.decode(data)
        return message

    def say(self, **message: Any) -> None:
        """Send an answer."""
        self.send(packed(message))

    def send(self, *frames: bytes) -> None:
        """Send frames as they are."""
        self._socket.send_multipart([self._routing_id, *frames])

    def greet(self, driver: Driver, **options: Any) -> Message:
        """Let the driver connect, with these `options`; returns its hello."""
        driver.do("connect", **options)
        hello = self.welcome()
        driver.expect("connected")
        return hello

    def welcome(self, **fields: Any) -> Message:
        """Answer a hello, which is returned."""
        hello = self.take("hello")
        self.say(**welcome(**fields))
        return hello

    def start(self, driver: Driver, name: str, **request: Any) -> str:
        """Let the driver start a generation; returns its id. It is not accepted yet."""
        driver.generate(name, **(request or {"prompt": "Tell"}))
        request_id: str = self.take("generate")["id"]
        return request_id

    def finish(self, request_id: str, *texts: str) -> None:
        """Accept a generation, answer with `texts` and end it."""
        self.say(t="accepted", id=request_id, prompt_tokens=9)
        for seq, text in enumerate(texts):
            self.say(t="delta", id=request_id, seq=seq, text=text, tokens=[seq])
        self.say(id=request_id, **done())

    def serves(self, driver: Driver, name: str = "after") -> None:
        """Check that the session goes on: a whole generation more."""
        self.finish(self.start(driver, name), "still ", "here")
        answered = driver.answered(name)
        assert answered.end["event"] == "done", answered.end
        assert answered.joined() == "still here"

    def leave(self) -> None:
        """Go away once the client's system has taken all that was said."""
        self._socket.close(linger=int(1000 * Driver.patience_s))

    def close(self) -> None:
        """Go away, as a daemon that dies."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
