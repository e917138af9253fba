"""How failures reach the user: one line on standard error, and an exit code."""

import sys
from collections.abc import Callable
from typing import NoReturn

import click

from runtime.errors import HearthError

FAILED = 1
USAGE = 2
INTERRUPTED = 130


class Failure(click.ClickException):
    """A failure with a message of one line that says what to do next."""

    exit_code = FAILED


def exit_code_of(error: BaseException) -> int | None:
    """The exit code for `error`; None for one that nobody foresaw."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return INTERRUPTED
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.UsageError):
        return USAGE
    if isinstance(error, (click.ClickException, HearthError, BrokenPipeError)):
        return FAILED
    return None


def report(error: BaseException) -> None:
    """Print `error` as one line on standard error; an interruption needs no words."""
    if isinstance(error, HearthError):
        line = str(error)
    elif isinstance(error, click.UsageError) and error.ctx is not None:
        line = f"{error.format_message().rstrip('.')}: see {error.ctx.command_path} --help"
    elif isinstance(error, click.ClickException):
        line = error.format_message()
    else:
        return
    click.echo(f"{click.style('hearth:', fg='red')} {' '.join(line.split())}", err=True)


def run_and_exit(work: Callable[[], object]) -> NoReturn:
    """Run `work` and end the program: with the number that it returns, or as its failure asks."""
    try:
        result = work()
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code_of(error)
        if code is None:
            raise
        report(error)
        sys.exit(code)
    sys.exit(result if isinstance(result, int) else 0)
