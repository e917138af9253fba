"""Logging: one structlog configuration for the daemon and the processes that it starts."""

from __future__ import annotations

import io
import logging
import math
import os
import select
import stat
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TextIO, cast

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from hearth.actors.journal import (
    PLACE,
    PRIORITIES,
    Journal,
    journal_entry,
    leads_to_journald,
    shaped,
)
from hearth.actors.settings import Format, Level

_CONSOLE_LOSS = "lines of the log were lost: {}\n"
_WHOLE_FROM = 1000
_EPOCH_DIGITS = 8
_PATIENCE_MS = 200
"""How long a line may wait for a reader of the log that is behind."""
_PIPE_PIECE = select.PIPE_BUF // 6
"""Characters that a pipe takes at once, of six bytes at most where they are no text."""


def request_id(epoch: str, rid: int) -> str:
    """The id of a request in the whole daemon: no other run of it has the same one."""
    return f"{epoch[:_EPOCH_DIGITS]}-{rid}"


class LossyStream:
    """Text to `stream`, line by line; what it cannot take is lost, so that the service goes on.

    That is a full disk, a reader that has gone, or one that takes nothing for `_PATIENCE_MS`. The
    next line that it takes comes behind `loss`, in which `{}` is how many were lost. `all_lost` are
    those of all times.
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
        """Nothing: a line has left, or it is lost."""

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
        """Where a pipe says that it has room, that is for so much; for more a write may hang."""
        if not self._by_pipe or len(text.encode("utf-8", "backslashreplace")) <= select.PIPE_BUF:
            return [text]
        return [text[i : i + _PIPE_PIECE] for i in range(0, len(text), _PIPE_PIECE)]


def _is_pipe(stream: TextIO) -> bool:
    return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)


Log = LossyStream | Journal
"""Where lines go that nobody waits for; it counts those that are lost."""


def _unbuffered(stream: TextIO) -> tuple[select.poll | None, TextIO]:
    """The stream without a buffer, which would keep what failed, and a poll for its room."""
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
    and JSON lines elsewhere; lines that journald reads carry their priority. A log that takes no
    lines loses them; nobody waits long for it or fails by it. Gives what counts those.
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
    """Log events of `level` and above from now on, to where they have gone before."""
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
    """The journal; None where it has no socket, as in a container: its lines are read then."""
    try:
        return Journal(place)
    except OSError:
        return None


def certain_log(name: str) -> structlog.typing.FilteringBoundLogger:
    """A log for what an operator waits for: no level leaves its lines out."""
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
    """In place of actors' numbers the ids of requests, where the daemon has told its `epoch`."""
    epoch = event.pop("epoch", "")
    if epoch and "rid" in event:
        event["request"] = request_id(epoch, event.pop("rid"))
    if epoch and "rids" in event:
        event["requests"] = [request_id(epoch, rid) for rid in event.pop("rids")]
    return event


def _shape_text(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """What a client has written is in some fields."""
    return {key: shaped(value) if isinstance(value, str) else value for key, value in event.items()}


def _round_numbers(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Three digits are enough for people, and whole numbers from there on."""
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
