"""Log events to journald with their fields: systemd.io/JOURNAL_NATIVE_PROTOCOL."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Mapping
from typing import Any, TextIO

import msgspec

PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
PLACE = "/run/systemd/journal/socket"
_NAMES = {"request": "REQUEST_ID", "requests": "REQUEST_ID", "code": "CODE"}
_LOSS = {"level": "warning", "event": "lines of the log were lost"}
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def leads_to_journald(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether what is written to `stream` goes to the journal: systemd.exec(5)."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, AttributeError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class Journal:
    """Sends events to journald and never waits: what it does not take at once is lost.

    The next one that it takes comes behind one that says how many; `all_lost` counts them since the
    start. Raises OSError where nobody listens at `place`.
    """

    def __init__(self, place: str = PLACE) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
        # Not connected: a journald that was started anew has another socket at the same place.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._place = place
        self._lost = self.all_lost = 0

    def send(self, entry: bytes) -> None:
        """Send what `journal_entry` gave."""
        if self._lost and self._try(journal_entry(None, "", {**_LOSS, "lines": self._lost})):
            self._lost = 0
        if self._lost or not self._try(entry):
            self._lost += 1
            self.all_lost += 1

    debug = info = warning = error = critical = send

    def _try(self, entry: bytes) -> bool:
        try:
            self._socket.sendto(entry, self._place)
        except OSError as error:
            return error.errno == errno.EMSGSIZE and self._try_as_file(entry)
        return True

    def _try_as_file(self, entry: bytes) -> bool:
        """What is too large for a datagram goes as the handle of a sealed file in memory."""
        try:
            file = os.memfd_create("hearth-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            with os.fdopen(file, "wb", 0) as opened:
                opened.write(entry)
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [file]))
                self._socket.sendmsg([], [rights], 0, self._place)
        except OSError:
            return False
        return True


def journal_entry(_logger: object, _name: str, event: Mapping[str, Any]) -> bytes:
    """The last processor: MESSAGE for people, and a field for everything that the event has."""
    fields = [("SYSLOG_IDENTIFIER", "hearth"), ("MESSAGE", _for_people(event))]
    fields.append(("PRIORITY", str(PRIORITIES[event["level"]])))
    for key, value in event.items():
        values = value if key == "requests" else [value]
        fields += [(_NAMES.get(key, f"HEARTH_{key.upper()}"), _text(one)) for one in values]
    return b"".join(_field(name, text) for name, text in fields)


def shaped(text: str) -> str:
    """`text` without what has no shape of its own, and could steer a terminal; line ends stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _for_people(event: Mapping[str, Any]) -> str:
    apart = ("event", "level", "exception")
    # journalctl shows no line that has control characters.
    words = [f"{key}={shaped(_text(value))}" for key, value in event.items() if key not in apart]
    line = " ".join([str(event["event"]), *words])
    return f"{line}\n{event['exception']}" if "exception" in event else line


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()


def _field(name: str, text: str) -> bytes:
    value = text.encode(errors="replace")
    # With a length where there are line ends: what a client has written begins no field by them.
    between = b"\n" + struct.pack("<Q", len(value)) if b"\n" in value else b"="
    return name.encode() + between + value + b"\n"
