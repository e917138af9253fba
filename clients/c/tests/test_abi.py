"""The C ABI as other languages use it: by ctypes, with a scripted ROUTER."""

import ctypes
import json
import os
import select
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

BUILT = Path(__file__).parents[1] / "build/plain/libhearth.so"
LIBRARY = Path(os.environ.get("HEARTH_LIBRARY", BUILT))
OK, REQUEST, SERVICE, CONNECTION, USAGE = range(5)
ACCEPTED, DELTA, DONE, FAILED = range(1, 5)
PATIENCE_MS = 20000
_COUNTS = ("prompt_tokens", "completion_tokens", "reasoning", "cached")


class Usage(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _COUNTS),
        *((name, ctypes.c_double) for name in ("queue_ms", "prefill_ms", "decode_ms")),
    ]


class Error(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("has_usage", ctypes.c_int32),
        ("retry_after_s", ctypes.c_double),
        ("usage", Usage),
        ("code", ctypes.c_char * 64),
        ("field", ctypes.c_char * 192),
        ("message", ctypes.c_char * 512),
    ]


class Frame(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char_p), ("size", ctypes.c_size_t)]


class Call(ctypes.Structure):
    _fields_ = [
        ("index", ctypes.c_int64),
        *((name, ctypes.c_char_p) for name in ("id", "name", "arguments")),
    ]


class Event(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int32),
        ("raw", ctypes.POINTER(ctypes.c_char)),
        ("raw_size", ctypes.c_size_t),
        ("prompt_tokens", ctypes.c_int64),
        ("request", ctypes.c_char_p),
        ("seq", ctypes.c_int64),
        ("choice", ctypes.c_int64),
        ("text", ctypes.c_char_p),
        ("text_size", ctypes.c_size_t),
        ("reasoning", ctypes.c_char_p),
        ("reasoning_size", ctypes.c_size_t),
        ("tokens", ctypes.POINTER(ctypes.c_int64)),
        ("token_count", ctypes.c_size_t),
        ("calls", ctypes.POINTER(Call)),
        ("call_count", ctypes.c_size_t),
        ("reason", ctypes.c_char_p),
        ("stop", ctypes.c_char_p),
        ("usage", ctypes.POINTER(Usage)),
        ("error", ctypes.POINTER(Error)),
    ]


Callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(Event), ctypes.c_void_p)
POINTER = ctypes.c_void_p


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(LIBRARY))
    lib.hearth_version.restype = ctypes.c_char_p
    for name, types in {
        "free": [POINTER],
        "client_close": [POINTER],
        "client_free": [POINTER],
        "cancel": [POINTER],
        "generation_free": [POINTER],
        "ended": [POINTER],
        "descriptor": [POINTER],
        "tokenize": [POINTER, ctypes.c_char_p, POINTER, ctypes.c_size_t, *[POINTER] * 3],
        "detokenize": [POINTER, POINTER, ctypes.c_size_t, *[POINTER] * 3],
        "generate": [
            *(POINTER, ctypes.c_char_p, POINTER, ctypes.c_size_t),
            *(Callback, POINTER, POINTER, POINTER),
        ],
        "next": [POINTER, ctypes.c_int, POINTER, POINTER],
    }.items():
        getattr(lib, f"hearth_{name}").argtypes = types
    return lib


class Peer:
    """A ROUTER that answers one client."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self._socket.bind(f"ipc://{path}")
        self.frames: list[bytes] = []

    def take(self) -> dict[str, Any]:
        self._routing_id, data, *self.frames = self._socket.recv_multipart()
        message: dict[str, Any] = msgspec.msgpack.decode(data)
        return message

    def say(self, **message: Any) -> None:
        self._socket.send_multipart([self._routing_id, msgspec.msgpack.encode(message)])

    def greet(self) -> None:
        assert self.take()["t"] == "hello"
        names = ("frame_bytes", "frames", "requests_per_client", "prompt_tokens", "total_tokens")
        limits = dict.fromkeys((*names, "queued_requests", "queued_tokens"), 4096)
        pictures = {"images": 4, "image_bytes": 100, "request_image_bytes": 100}
        limits = {**limits, **pictures, "lease_s": 30}
        self.say(t="welcome", proto=1, server="scripted", limits=limits, epoch="first")

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    made = Peer(tmp_path_factory.mktemp("p") / "s")
    yield made
    made.close()


def made_client(library: ctypes.CDLL, **options: Any) -> tuple[int, ctypes.c_void_p, Error]:
    client, error = ctypes.c_void_p(), Error()
    text = json.dumps(options).encode()
    kind = library.hearth_client_new(text, ctypes.byref(client), ctypes.byref(error))
    return kind, client, error


@pytest.fixture
def client(library: ctypes.CDLL, peer: Peer) -> Iterator[ctypes.c_void_p]:
    kind, made, _ = made_client(library, address=str(peer.path), name="ctypes")
    assert kind == OK
    while_greeted(peer.greet, lambda: library.hearth_connect(made, None, None))
    yield made
    library.hearth_client_free(made)


def while_greeted(answer: Callable[[], None], ask: Callable[[], int]) -> None:
    """Ask a daemon that answers meanwhile."""
    thread = threading.Thread(target=answer)
    thread.start()
    assert ask() == OK
    thread.join()


def started(library: ctypes.CDLL, client: ctypes.c_void_p, callback: Any = None) -> ctypes.c_void_p:
    generation, error = ctypes.c_void_p(), Error()
    seed = (1 << 63) - 1
    picture = {"type": "image", "frame": 1, "encoding": "mono8", "width": 3, "height": 1}
    turn = {"role": "user", "content": [picture, {"type": "text", "text": "Was? 🙂"}]}
    request = json.dumps({"messages": [turn], "seed": seed}).encode()
    frames = (Frame * 1)(Frame(b"\0\1\2", 3))
    kind = library.hearth_generate(
        client, request, frames, 1, callback or Callback(), None,
        ctypes.byref(generation), ctypes.byref(error),
    )  # fmt: skip
    assert kind == OK, error.message
    return generation


def next_event(library: ctypes.CDLL, generation: ctypes.c_void_p, timeout_ms: int) -> Event | None:
    event = ctypes.POINTER(Event)()
    assert library.hearth_next(generation, timeout_ms, ctypes.byref(event), None) == OK
    # A pointer that is NULL is false.
    return event.contents if bool(event) else None


def say_reply(peer: Peer) -> dict[str, Any]:
    asked = peer.take()
    name = asked["id"]
    call = {"index": 0, "id": "c1", "name": "set", "arguments": "{}"}
    peer.say(t="accepted", id=name, prompt_tokens=7, request="r-1")
    peer.say(t="delta", id=name, seq=0, text="h\0é", tokens=[5, 6], tool_calls=[call], mood=1)
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "decode_ms": 1.5}
    peer.say(t="done", id=name, reason="stop", stop="\n", usage=usage)
    return asked


def test_symbols_are_versioned_and_no_others_are_seen() -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", "--with-symbol-versions", str(BUILT)],
        capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    names = {line.split()[-1] for line in listed if line} - {"HEARTH_0"}
    header = (Path(__file__).parents[1] / "hearth.h").read_text()
    declared = {
        line.split("(")[0].split()[-1].lstrip("*")
        for line in header.splitlines()
        if line.startswith("HEARTH_API ")
    }
    assert len(declared) == 15
    assert names == {f"{one}@@HEARTH_0" for one in declared}
    dynamic = subprocess.run(
        ["readelf", "-d", str(BUILT)], capture_output=True, text=True, check=True
    ).stdout
    assert "soname: [libhearth.so.0]" in dynamic


def test_version(library: ctypes.CDLL) -> None:
    assert library.hearth_version() == b"0.3.0"


def test_events_are_polled_by_a_descriptor(
    library: ctypes.CDLL, client: ctypes.c_void_p, peer: Peer
) -> None:
    generation = started(library, client)
    descriptor = library.hearth_descriptor(generation)
    assert next_event(library, generation, 0) is None
    asked = say_reply(peer)
    assert asked["seed"] == (1 << 63) - 1
    assert asked["messages"][0]["content"][1]["text"] == "Was? 🙂"
    assert peer.frames == [b"\0\1\2"]
    seen = []
    while not library.hearth_ended(generation):
        assert select.select([descriptor], [], [], PATIENCE_MS / 1000)[0]
        while (event := next_event(library, generation, 0)) is not None:
            raw = msgspec.msgpack.decode(event.raw[: event.raw_size])
            seen.append((event.type, raw["t"]))
            if event.type == ACCEPTED:
                assert (event.prompt_tokens, event.request) == (7, b"r-1")
            elif event.type == DELTA:
                assert ctypes.string_at(event.text, 1) == b"h"
                assert event.text_size == 4
                assert event.tokens[: event.token_count] == [5, 6]
                assert event.call_count == 1
                assert event.calls[0].name == b"set"
                assert raw["mood"] == 1
            else:
                assert (event.reason, event.stop) == (b"stop", b"\n")
                assert event.usage.contents.decode_ms == 1.5
    assert seen == [(ACCEPTED, "accepted"), (DELTA, "delta"), (DONE, "done")]
    assert next_event(library, generation, -1) is None
    library.hearth_generation_free(generation)


def test_a_failure_is_the_last_event(
    library: ctypes.CDLL, client: ctypes.c_void_p, peer: Peer
) -> None:
    generation = started(library, client)
    usage = {"prompt_tokens": 7, "completion_tokens": 2}
    peer.say(
        t="error", id=peer.take()["id"], code="queue_full", message="é" * 400, field="n",
        retry_after_s=1.5, usage=usage,
    )  # fmt: skip
    event = next_event(library, generation, PATIENCE_MS)
    assert event is not None
    assert event.type == FAILED
    error = event.error.contents
    assert (error.kind, error.code, error.field) == (SERVICE, b"queue_full", b"n")
    assert (error.retry_after_s, error.has_usage) == (1.5, 1)
    assert error.usage.completion_tokens == 2
    assert error.message.decode() == "é" * 255
    assert library.hearth_ended(generation) == 1
    library.hearth_generation_free(generation)


def test_callbacks_come_in_order_and_may_free_their_generation(
    library: ctypes.CDLL, client: ctypes.c_void_p, peer: Peer
) -> None:
    ended = threading.Event()
    kept: list[ctypes.c_void_p] = []
    seen: list[int] = []

    def hear(event: Any, _user: Any) -> None:
        seen.append(event.contents.type)
        if event.contents.type == DONE:
            library.hearth_generation_free(kept[0])
            ended.set()

    callback = Callback(hear)
    kept.append(started(library, client, callback))
    say_reply(peer)
    assert ended.wait(PATIENCE_MS / 1000)
    assert seen == [ACCEPTED, DELTA, DONE]


def test_a_generation_that_is_freed_is_cancelled(
    library: ctypes.CDLL, client: ctypes.c_void_p, peer: Peer
) -> None:
    generation = started(library, client)
    asked = peer.take()["id"]
    library.hearth_generation_free(generation)
    assert peer.take() == {"t": "cancel", "id": asked}


def test_what_is_returned_is_freed_by_the_caller(
    library: ctypes.CDLL, client: ctypes.c_void_p, peer: Peer
) -> None:
    tokens, text, size = ctypes.POINTER(ctypes.c_int64)(), ctypes.c_char_p(), ctypes.c_size_t()
    while_greeted(
        lambda: peer.say(t="tokens", id=peer.take()["id"], tokens=[3, 4, 5]),
        lambda: library.hearth_tokenize(
            client, b'{"text": "abc"}', None, 0, ctypes.byref(tokens), ctypes.byref(size), None
        ),
    )
    assert tokens[: size.value] == [3, 4, 5]
    library.hearth_free(tokens)
    while_greeted(
        lambda: peer.say(t="text", id=peer.take()["id"], text="a\0c"),
        lambda: library.hearth_detokenize(
            client, (ctypes.c_int64 * 1)(3), 1, ctypes.byref(text), ctypes.byref(size), None
        ),
    )
    assert ctypes.string_at(text, size.value + 1) == b"a\0c\0"
    library.hearth_free(text)


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "connection_refused": (CONNECTION, {"address": "/nowhere/s"}, ""),
    "unsupported_option": (REQUEST, {"colour": 1}, "colour"),
    "invalid_value": (REQUEST, {"timeout_s": "soon"}, "timeout_s"),
    "connection_failed": (CONNECTION, {"address": "udp://a"}, ""),
}


@pytest.mark.parametrize("code", REFUSED)
def test_failures_of_calls_are_written(library: ctypes.CDLL, code: str) -> None:
    expected, options, field = REFUSED[code]
    kind, client, error = made_client(library, **options)
    if kind == OK:
        kind = library.hearth_connect(client, None, ctypes.byref(error))
    library.hearth_client_free(client)
    assert (kind, error.kind) == (expected, expected)
    assert (error.code.decode(), error.field.decode()) == (code, field)
    assert error.message


def test_no_json_and_no_handle_are_errors(library: ctypes.CDLL, client: ctypes.c_void_p) -> None:
    generation, error = ctypes.c_void_p(), Error()
    told = (ctypes.byref(generation), ctypes.byref(error))
    ask = library.hearth_generate
    assert ask(client, b"{", None, 0, Callback(), None, *told) == REQUEST
    assert ask(client, b'{"id": "1"}', None, 0, Callback(), None, *told) == REQUEST
    assert error.field == b"id"
    assert ask(client, None, None, 0, Callback(), None, *told) == USAGE
    assert ask(None, b"{}", None, 0, Callback(), None, *told) == USAGE
    assert error.code == b"invalid_call"
    assert library.hearth_descriptor(None) == -1
    library.hearth_generation_free(None)
    library.hearth_client_free(None)
