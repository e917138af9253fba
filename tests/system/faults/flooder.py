"""A program that floods a daemon with messages, or burns CPU and sends nothing.

`python -m tests.system.faults.flooder flood SOCKET KIND` or `... burn SHARE`: it says a line when
it begins, goes on until its standard input ends, and says then which share of a processor it took.
"""

import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

_BIAS = [[token, -1.0] for token in range(1024)]
_PART = {"type": "text", "text": "x"}
_TICK_S = 0.01
_ANSWERS = 20


def _asks(**fields: Any) -> bytes:
    return msgspec.msgpack.encode({"t": "generate", "id": "flood", "max_tokens": 1, **fields})


def _turns(parts: int, turns: int, last: Any) -> bytes:
    content = [{"role": "user", "content": [_PART] * parts} for _ in range(turns)]
    content[-1] = {"role": "user", "content": [*[_PART] * (parts - 1), {**_PART, "text": last}]}
    return _asks(messages=content)


KINDS: dict[str, Callable[[], bytes]] = {
    "status": lambda: msgspec.msgpack.encode({"t": "status", "id": "flood"}),
    "hello": lambda: msgspec.msgpack.encode({"t": "hello", "proto": [1]}),
    "unknown adapter": lambda: _asks(prompt="x", adapter="none", logit_bias=_BIAS),
    "wrong last token": lambda: msgspec.msgpack.encode(
        {"t": "detokenize", "id": "flood", "tokens": [1] * 65535 + ["x"]}
    ),
    "wrong last part": lambda: _turns(200, 200, 5),
    "many parts": lambda: _turns(150, 250, "x"),
    "a megabyte": lambda: msgspec.msgpack.encode({"t": "tokenize", "text": "x" * 1_000_000}),
}
"""Messages by name; each is one that costs much for its kind."""


def flood(path: str, kind: str) -> None:
    """Send messages of a kind as fast as the daemon takes them."""
    message = KINDS[kind]()
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(f"ipc://{path}")
    peer.send(msgspec.msgpack.encode({"t": "hello", "proto": [1], "client": "flood"}))
    peer.recv()
    sent = 0
    while goes_on(0.0):
        try:
            peer.send(message, zmq.NOBLOCK)
            sent += 1
        except zmq.Again:
            peer.poll(1, zmq.POLLOUT | zmq.POLLIN)
        for _ in range(_ANSWERS):
            if not peer.poll(0):
                break
            peer.recv()
    context.destroy(linger=0)


def burn(share: float) -> None:
    """Be busy for a share of the time."""
    busy_s = share * _TICK_S
    while goes_on(_TICK_S - busy_s):
        until = time.thread_time() + busy_s
        while time.thread_time() < until:
            pass


def goes_on(seconds: float) -> bool:
    """Wait so long; whether the standard input is still open then."""
    return not select.select([sys.stdin], [], [], seconds)[0]


def main() -> None:
    """Do what the arguments say."""
    how, *given = sys.argv[1:]
    os.write(1, b"begins\n")
    began, before = time.monotonic(), time.process_time()
    if how == "flood":
        flood(*given)
    else:
        burn(float(given[0]))
    share = (time.process_time() - before) / (time.monotonic() - began)
    os.write(1, f"{share:.4f}\n".encode())


if __name__ == "__main__":
    main()
