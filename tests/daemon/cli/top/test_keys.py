from __future__ import annotations

import os
import pty
import termios
from collections.abc import Iterator

import pytest

from hearth.daemon.cli.top.command import key_presses, keys_of


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal: what a person types into, and what a program reads."""
    person, program = pty.openpty()
    yield person, program
    os.close(person)
    os.close(program)


def mode(descriptor: int) -> int:
    return int(termios.tcgetattr(descriptor)[3]) & (termios.ICANON | termios.ECHO)


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[Bs", ["up", "down", "s"]),
        (b"\x1bOA", ["up"]),
        (b"\x1b[C\x1b\xc3\xa4", []),
        (b"", ["q"]),
    ],
)
def test_keys_have_names(data: bytes, keys: list[str]) -> None:
    assert keys_of(data) == keys


def test_a_key_needs_no_return_and_is_not_shown(terminal: tuple[int, int]) -> None:
    person, program = terminal
    with key_presses(program) as wait:
        assert mode(program) == 0
        assert wait(0) == []
        os.write(person, b"s")
        assert wait(10) == ["s"]
        assert wait(-1) == []


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, ValueError])
def test_the_terminal_is_put_back(
    terminal: tuple[int, int], end: type[BaseException] | None
) -> None:
    before = mode(terminal[1])
    assert before
    try:
        with key_presses(terminal[1]):
            if end is not None:
                raise end
    except (KeyboardInterrupt, ValueError):
        pass
    assert mode(terminal[1]) == before
