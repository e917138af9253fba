"""A peer that speaks ZeroMQ's wire protocol by hand, to send what the library does not."""

import socket
from pathlib import Path

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
_MORE_AND_LONG = b"\x03"


def connected_peer(path: Path) -> socket.socket:
    """A connection that has shaken hands as a DEALER."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(10)
    peer.connect(str(path))
    peer.sendall(_GREETING + b"\x04" + bytes([len(_READY)]) + _READY)
    return peer


def send_unfinished(peer: socket.socket, count: int, size: int) -> None:
    """Send frames of which each says that another follows; OSError when the other side leaves."""
    frame = _MORE_AND_LONG + size.to_bytes(8, "big") + b"x" * size
    for _ in range(count):
        peer.sendall(frame)
