"""A peer that speaks ZeroMQ's wire protocol by hand, to send what the library does not."""

import socket
import struct
from pathlib import Path

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity"
_LONG = b"\x02"
_MORE_AND_LONG = b"\x03"


_PATIENCE_S = 10


def connection(path: Path) -> socket.socket:
    """A connection that has said nothing."""
    peer = socket.socket(socket.AF_UNIX)
    # Not Python's own: with it a connection that has to wait for others is refused.
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _PATIENCE_S, 0))
    peer.connect(str(path))
    return peer


def connected_peer(path: Path, identity: bytes = b"") -> socket.socket:
    """A connection that has shaken hands as a DEALER, which may call itself something."""
    peer = connection(path)
    peer.settimeout(_PATIENCE_S)
    ready = _READY + len(identity).to_bytes(4, "big") + identity
    peer.sendall(_GREETING + b"\x04" + bytes([len(ready)]) + ready)
    return peer


def send_message(peer: socket.socket, data: bytes) -> None:
    """Send a message of one frame; OSError when the other side has left."""
    peer.sendall(_LONG + len(data).to_bytes(8, "big") + data)


def send_unfinished(peer: socket.socket, count: int, size: int) -> None:
    """Send frames of which each says that another follows; OSError when the other side leaves."""
    frame = _MORE_AND_LONG + size.to_bytes(8, "big") + b"x" * size
    for _ in range(count):
        peer.sendall(frame)


def declare(peer: socket.socket, size: int) -> None:
    """Say that a frame of `size` bytes follows, and send none of it."""
    peer.sendall(_LONG + size.to_bytes(8, "big"))


def has_ended(peer: socket.socket) -> bool:
    """True where the other side has closed the connection."""
    # Python would wait for as long as the socket's own timeout, whatever a flag says.
    patience = peer.gettimeout()
    peer.setblocking(False)
    try:
        while peer.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        peer.settimeout(patience)
    return True
