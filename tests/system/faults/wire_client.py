"""A client that speaks the protocol by hand, and keeps every answer with the time it came."""

import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq

from hearth.daemon.cli.errors import Failure
from hearth.runtime.request import RowToken, TopLogprob
from hearth_client.keys import ClientKeys, secure

PATIENCE_S = 60.0
"""Seconds to wait for what has to come, before a row counts as not survived."""
_LEASE_S = 60.0
_POLL_S = 0.02
_STATUS_S = 0.02
_FINAL = ("done", "error")

Answer = dict[str, Any]


class Received(NamedTuple):
    """An answer, and when it came by the monotonic clock."""

    seconds: float
    answer: Answer


class WireClient:
    """A connection to the daemon at `socket`, or by TCP; `hello` may be left for later.

    It is for one thread. What waits raises Failure when nothing comes for `PATIENCE_S`.
    """

    def __init__(
        self,
        socket: Path,
        *,
        hello: bool = True,
        identity: bytes = b"",
        address: str = "",
        keys: ClientKeys | None = None,
    ) -> None:
        self.received: list[Received] = []
        self.asked: list[str] = []
        self._ids = count(1)
        self._answers: dict[str, list[Received]] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, round(PATIENCE_S * 1000))
        if identity:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        if keys is not None:
            secure(self._socket, keys)
        self._socket.connect(address or f"ipc://{socket}")
        self.limits: dict[str, Any] = self.send_hello()["limits"] if hello else {}

    def send(self, *frames: bytes | Answer) -> None:
        """Send a message of these frames, maps encoded."""
        self._socket.send_multipart(
            [one if isinstance(one, bytes) else msgspec.msgpack.encode(one) for one in frames]
        )

    def send_hello(self, **fields: Any) -> Answer:
        """Say hello; the answer, whatever it is."""
        before = len(self.received)
        self.send({"t": "hello", "proto": [1], "client": "faults", "lease_s": _LEASE_S, **fields})
        self.wait(lambda: len(self.received) > before)
        return self.received[before].answer

    def generate(self, prompt: str, **options: Any) -> str:
        """Ask for a reply that no end token ends; the id, which has to get one terminal answer."""
        request_id = self.new_id()
        self.asked.append(request_id)
        self.send(
            {"t": "generate", "id": request_id, "prompt": prompt, "ignore_eos": True, **options}
        )
        return request_id

    def look(self, text: str, picture: bytes, says: Answer | None = None, **options: Any) -> str:
        """Ask about a picture as `generate` does: a JPEG file, or what is said of it."""
        image = {"type": "image", "frame": 1, **(says or {"format": "jpeg"})}
        return self.send_parts([image, {"type": "text", "text": text}], picture, **options)

    def send_parts(self, parts: Sequence[Answer], *frames: bytes, **options: Any) -> str:
        """Ask with a user's message of these parts as `generate` does; the id."""
        request_id = self.new_id()
        self.asked.append(request_id)
        asked = {"t": "generate", "id": request_id, "ignore_eos": True, **options}
        turn = {"role": "user", "content": list(parts)}
        self.send({**asked, "messages": [turn]}, *frames)
        return request_id

    def ask(self, kind: str, *frames: bytes, **fields: Any) -> Answer:
        """Ask something else; its answer."""
        request_id = self.new_id()
        self.send({"t": kind, "id": request_id, **fields}, *frames)
        return self.first(request_id)

    def cancel(self, request_id: str) -> None:
        """Cancel a request."""
        self.send({"t": "cancel", "id": request_id})

    def new_id(self) -> str:
        """An id that is not in use."""
        return f"f{next(self._ids)}"

    def first(self, request_id: str) -> Answer:
        """Wait for the first answer to a request."""
        self.wait(lambda: self.of(request_id))
        return self.of(request_id)[0].answer

    def end(self, request_id: str) -> Received:
        """Wait for the terminal answer of a generation."""
        self.wait(lambda: self.ends(request_id))
        return self.ends(request_id)[0]

    def outcome(self, request_id: str) -> str:
        """Wait for the end; its reason, or its error code."""
        answer = self.end(request_id).answer
        return str(answer["reason"] if answer["t"] == "done" else answer["code"])

    def wait_for_deltas(self, request_id: str, deltas: int = 1) -> None:
        """Wait for so many deltas of a request, or for its end."""
        self.wait(lambda: self.ends(request_id) or len(self.deltas(request_id)) >= deltas)

    def wait_for_status(self, condition: Callable[[Answer], object]) -> Answer:
        """Ask for the status until it is as wanted; the status."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status = self.ask("status")
            if condition(status):
                return status
            if time.monotonic() > deadline:
                raise Failure(f"the status stays {status}")
            self.listen(_STATUS_S)

    def wait(self, condition: Callable[[], object]) -> None:
        """Listen until something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise Failure(f"the daemon was silent for {PATIENCE_S:g} s")
            self._take(_POLL_S)

    def listen(self, seconds: float) -> None:
        """Take what comes within a time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._take(left)

    def of(self, request_id: str) -> list[Received]:
        """All answers to a request so far."""
        return self._answers.get(request_id, [])

    def ends(self, request_id: str) -> list[Received]:
        """The terminal answers of a generation so far: there has to be one."""
        return [one for one in self.of(request_id) if one.answer["t"] in _FINAL]

    def deltas(self, request_id: str) -> list[Received]:
        """The deltas of a generation so far."""
        return [one for one in self.of(request_id) if one.answer["t"] == "delta"]

    def tokens(self, request_id: str) -> list[RowToken]:
        """The tokens of a generation so far, with what is told about them."""
        found: list[RowToken] = []
        for _, delta in self.deltas(request_id):
            told = delta.get("logprobs", [])
            for place, token_id in enumerate(delta["tokens"]):
                one: Answer = told[place] if place < len(told) else {"logprob": None}
                top = tuple(TopLogprob(*pair) for pair in one.get("top", []))
                found.append(RowToken(0, token_id, one["logprob"], top))
        return found

    def whole_text(self, request_id: str) -> str:
        """Wait for the end of a generation; its text."""
        self.end(request_id)
        return self.text(request_id)

    def text(self, request_id: str) -> str:
        """The text of a generation so far."""
        return "".join(one.answer["text"] for one in self.deltas(request_id))

    def lost(self) -> list[str]:
        """The generations without exactly one terminal answer, or with an answer behind it."""
        return [one for one in self.asked if not self._is_whole(one)]

    def close(self) -> None:
        """Leave without a word."""
        self._socket.close()
        self._context.term()

    def _is_whole(self, request_id: str) -> bool:
        kinds = [one.answer["t"] for one in self.of(request_id)]
        return sum(kind in _FINAL for kind in kinds) == 1 and kinds[-1] in _FINAL

    def _take(self, seconds: float) -> None:
        if not self._socket.poll(max(1, round(seconds * 1000))):
            return
        frames = self._socket.recv_multipart()
        if frames[-1]:  # where a delimiter was sent it comes back
            received = Received(time.monotonic(), msgspec.msgpack.decode(frames[-1]))
            self.received.append(received)
            self._answers.setdefault(received.answer.get("id", ""), []).append(received)
