"""Logging: one structlog configuration for the daemon and the processes that it starts."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import math
import os
import select
import socket
import stat
import struct
import sys
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO, cast

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from hearth.actors.settings import Format, Level

PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
PLACE = "/run/systemd/journal/socket"
_NAMES = {"request": "REQUEST_ID", "requests": "REQUEST_ID", "code": "CODE"}
_LOSS = {"level": "warning", "event": "lines of the log were lost"}
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def leads_to_journald(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """True if what is written to `stream` goes to the journal: systemd.exec(5)."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, AttributeError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class Journal:
    """Sender of events to journald that never waits: what the socket does not take is lost.

    The next event that it takes follows one with the number of those lost; `all_lost` counts them
    since the start. Raises OSError if nothing listens at `place`.
    """

    def __init__(self, place: str = PLACE) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
        # Not connected: a journald that was started anew has another socket at the same place.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._place = place
        self._lost = self.all_lost = 0

    def send(self, entry: bytes) -> None:
        """Send an entry that `journal_entry` has made."""
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
        """Send an entry that is too large for a datagram as the handle of a sealed memory file."""
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
    """`text` without characters that are not printable and could control a terminal.

    Line ends and tabs stay.
    """
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


_CONSOLE_LOSS = "lines of the log were lost: {}\n"
_WHOLE_FROM = 1000
_EPOCH_DIGITS = 8
_PATIENCE_MS = 200
"""Milliseconds for which a line may wait for a reader of the log that is behind."""
_PIPE_PIECE = select.PIPE_BUF // 6
"""Characters that a pipe takes at once, of six bytes at most where they are no text."""


def request_id(epoch: str, rid: int) -> str:
    """The id of a request in the whole daemon: no other run of it has the same one."""
    return f"{epoch[:_EPOCH_DIGITS]}-{rid}"


class LossyStream:
    """Writer of lines to `stream` that drops those which the stream cannot take.

    That is a full disk, a closed pipe, or a reader that takes nothing for `_PATIENCE_MS`. The next
    line that it takes follows `loss`, in which `{}` is the number of those lost. `all_lost` counts
    them since the start.
    """

    def __init__(self, stream: TextIO, loss: str) -> None:
        self._loss = loss
        self._poll, self._stream = _unbuffered(stream)
        self._by_pipe = self._poll is not None and _is_pipe(stream)
        self._torn = False
        self._lost = self.all_lost = 0

    def write(self, line: str) -> None:
        """Write one line with its end, or count it as lost."""
        told = self._loss.replace("{}", str(self._lost)) if self._lost else ""
        if self._try(told + line):
            self._lost = 0
        else:
            self._lost += 1
            self.all_lost += 1

    def flush(self) -> None:
        """Do nothing: a line has been written, or it is lost."""

    def _try(self, text: str) -> bool:
        for piece in self._pieces(f"\n{text}" if self._torn else text):
            # One wait for all lines that find the reader behind, not one for each of them.
            if self._poll is not None and not self._poll.poll(0 if self._lost else _PATIENCE_MS):
                return False
            try:
                self._stream.write(piece)
                self._stream.flush()
            except OSError:
                return False
            self._torn = True
        self._torn = False
        return True

    def _pieces(self, text: str) -> list[str]:
        """Split text for a pipe: poll(2) promises room for PIPE_BUF bytes, more may block."""
        if not self._by_pipe or len(text.encode("utf-8", "backslashreplace")) <= select.PIPE_BUF:
            return [text]
        return [text[i : i + _PIPE_PIECE] for i in range(0, len(text), _PIPE_PIECE)]


def _is_pipe(stream: TextIO) -> bool:
    return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)


Log = LossyStream | Journal
"""Output of the log, which counts the lines that it lost."""


def _unbuffered(stream: TextIO) -> tuple[select.poll | None, TextIO]:
    """The stream without a buffer, which would keep what failed, and a poll of its readiness."""
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError):
        return None, stream
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    raw = io.FileIO(descriptor, "w", closefd=False)
    text = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
    return poll, text


def configure_logging(
    level: Level,
    form: Format = "auto",
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
    journal: str = PLACE,
) -> Log:
    """Send all log events of `level` and above to `stream` (standard error by default).

    `auto` is coloured text on a terminal, fields for `journal` where the stream leads to journald,
    and JSON lines elsewhere; lines that journald reads carry their priority. An output that takes
    no lines loses them: no caller waits long or fails. Returns the output, which counts those.
    """
    stream = sys.stderr if stream is None else stream
    environ = os.environ if environ is None else environ
    console = form == "console" or (form == "auto" and stream.isatty())
    journald = leads_to_journald(stream, environ)
    native = _open_journal(journal) if journald and form == "auto" else None
    if native is not None:
        fields: list[Processor] = [structlog.processors.format_exc_info, journal_entry]
        _configure(level, fields, lambda *_: native)
        return native
    clock = structlog.processors.TimeStamper("%H:%M:%S" if console else "iso", utc=not console)
    lines = _console(stream, environ) if console else _json(journal=journald)
    lossy = LossyStream(stream, _CONSOLE_LOSS if console else _json_loss(journal=journald))
    factory = structlog.WriteLoggerFactory(file=cast("TextIO", lossy))
    _configure(level, [clock, *lines], factory)
    return lossy


def set_level(level: Level) -> None:
    """Log events of `level` and above from now on, to the same output."""
    structlog.configure(wrapper_class=_filtering(level))


def _filtering(level: Level) -> type[structlog.typing.FilteringBoundLogger]:
    return structlog.make_filtering_bound_logger(getattr(logging, level.upper()))


def _configure(
    level: Level, output: list[Processor], factory: Callable[..., WrappedLogger]
) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _name_request,
            structlog.processors.add_log_level,
            *output,
        ],
        wrapper_class=_filtering(level),
        logger_factory=factory,
        cache_logger_on_first_use=False,
    )


def _open_journal(place: str) -> Journal | None:
    """The journal; None if it has no socket, as in a container, where it reads lines instead."""
    try:
        return Journal(place)
    except OSError:
        return None


def certain_log(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger for events that an operator needs at every level."""
    every = structlog.make_filtering_bound_logger(logging.NOTSET)
    log = structlog.wrap_logger(None, wrapper_class=every, logger_factory_args=(name,))
    return cast("structlog.typing.FilteringBoundLogger", log)


def _console(stream: TextIO, environ: Mapping[str, str]) -> list[Processor]:
    colours = stream.isatty() and not environ.get("NO_COLOR")
    # Plain tracebacks: the renderer's default prints local variables, and with them user text.
    return [
        _shape_text,
        _round_numbers,
        structlog.dev.ConsoleRenderer(
            colors=colours,
            pad_event_to=20,
            sort_keys=False,
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def _name_request(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Replace the request numbers of actors by request ids, if the daemon's `epoch` is bound."""
    epoch = event.pop("epoch", "")
    if epoch and "rid" in event:
        event["request"] = request_id(epoch, event.pop("rid"))
    if epoch and "rids" in event:
        event["requests"] = [request_id(epoch, rid) for rid in event.pop("rids")]
    return event


def _shape_text(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Make fields printable: some hold text of clients."""
    return {key: shaped(value) if isinstance(value, str) else value for key, value in event.items()}


def _round_numbers(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Round floats for people: to three digits, and to whole numbers from `_WHOLE_FROM` on."""
    for key, value in event.items():
        if isinstance(value, float) and math.isfinite(value):
            event[key] = float(f"{value:.3g}") if abs(value) < _WHOLE_FROM else round(value)
    return event


def _json(*, journal: bool) -> list[Processor]:
    return [structlog.processors.format_exc_info, partial(_render_json, journal=journal)]


def _json_loss(*, journal: bool) -> str:
    line = '{"level":"warning","event":"lines of the log were lost","lines":{}}\n'
    return f"<{PRIORITIES['warning']}>{line}" if journal else line


def _render_json(_logger: WrappedLogger, _name: str, event: EventDict, *, journal: bool) -> str:
    first = {key: event.pop(key) for key in ("timestamp", "level", "event")}
    line = msgspec.json.encode({**first, **event}, enc_hook=str).decode()
    return f"<{PRIORITIES[first['level']]}>{line}" if journal else line
