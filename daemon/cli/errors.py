"""Failures as the user sees them: one line on standard error, and an exit code."""

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import click

from hearth.actors.logs import PRIORITIES, leads_to_journald
from hearth.runtime.errors import HearthError


def keep_to_this_machine(environ: MutableMapping[str, str]) -> None:
    """Have ONNX Runtime report nothing about this machine, unless the operator decided otherwise.

    Its official builds keep an identifier in the user's cache folder and send events to their
    maker. They read the variable once, when they are loaded; other processes inherit it.
    """
    environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


FAILED = 1
USAGE = 2
INTERRUPTED = 130
UNREAD = 141
"""Exit code of a program that SIGPIPE ends: its output was not read to the end."""


class Failure(click.ClickException):
    """A failure with a message of one line that says what to do next."""

    exit_code = FAILED


class Terminated(BaseException):
    """SIGTERM came: what was begun is undone before the program ends by it."""


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Report a refusal within the block as wrong usage, which no engine, file or daemon changes."""
    try:
        yield
    except HearthError as error:
        raise click.UsageError(error.message) from error


def exit_code_of(error: BaseException) -> int | None:
    """The exit code for `error`; None for an unexpected one."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return INTERRUPTED
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.UsageError):
        return USAGE
    if isinstance(error, BrokenPipeError):
        return UNREAD
    if isinstance(error, (click.ClickException, HearthError, OSError)):
        return FAILED
    return None


def report(error: BaseException) -> None:
    """Print `error` as one line on standard error; an interruption prints nothing.

    Under journald the line is an error there too.
    """
    if isinstance(error, HearthError):
        line = str(error)
    elif isinstance(error, click.UsageError) and error.ctx is not None:
        line = f"{error.format_message().rstrip('.')}: see {error.ctx.command_path} --help"
    elif isinstance(error, click.ClickException):
        line = error.format_message()
    elif isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        line = _system_line(error)
    else:
        return
    level = f"<{PRIORITIES['error']}>" if leads_to_journald(sys.stderr, os.environ) else ""
    click.echo(f"{level}{click.style('hearth:', fg='red')} {' '.join(line.split())}", err=True)


def _system_line(error: OSError) -> str:
    """Refusal of the system, with the file where it names one."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{error.filename}: {reason}"


def run_and_exit(work: Callable[[], object]) -> NoReturn:
    """Run `work` and end the program: with the number that it returns, or as its failure asks.

    SIGTERM ends it as that signal does, once nothing is left half done.
    """
    keep_to_this_machine(os.environ)
    _print_what_can_be_printed()
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        result = work()
    except Terminated:
        signal.raise_signal(signal.SIGTERM)
        raise
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code_of(error)
        if code is None:
            raise
        report(error)
        sys.exit(code)
    finally:
        # A daemon that has stopped lets further signals be.
        if signal.getsignal(signal.SIGTERM) is _terminate:
            signal.signal(signal.SIGTERM, before)
    sys.exit(result if isinstance(result, int) else 0)


def _print_what_can_be_printed() -> None:
    """Let what an encoding lacks be a question mark, as on a terminal that has no such sign."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _terminate(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated
