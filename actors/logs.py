"""Logging: one structlog configuration for the daemon and the processes that it starts."""

import logging
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]

# syslog's numbers, which journald reads from the front of a line: sd-daemon(3).
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def configure_logging(
    level: Level,
    form: Format = "auto",
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Send all log events of `level` and above to `stream` (standard error by default).

    `auto` is coloured text on a terminal and JSON lines elsewhere; under journald (where
    `$JOURNAL_STREAM` is set) each JSON line carries its priority.
    """
    stream = sys.stderr if stream is None else stream
    environ = os.environ if environ is None else environ
    console = form == "console" or (form == "auto" and stream.isatty())
    output = _console(stream, environ) if console else _json(journal="JOURNAL_STREAM" in environ)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
            *output,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )


def _console(stream: TextIO, environ: Mapping[str, str]) -> list[Processor]:
    colours = stream.isatty() and not environ.get("NO_COLOR")
    # Plain tracebacks: the renderer's default prints local variables, and with them user text.
    return [
        structlog.dev.ConsoleRenderer(
            colors=colours,
            pad_event_to=20,
            sort_keys=False,
            exception_formatter=structlog.dev.plain_traceback,
        )
    ]


def _json(*, journal: bool) -> list[Processor]:
    return [structlog.processors.format_exc_info, partial(_render_json, journal=journal)]


def _render_json(_logger: WrappedLogger, _name: str, event: EventDict, *, journal: bool) -> str:
    first = {key: event.pop(key) for key in ("timestamp", "level", "event")}
    line = msgspec.json.encode({**first, **event}, enc_hook=str).decode()
    return f"<{_PRIORITIES[first['level']]}>{line}" if journal else line
