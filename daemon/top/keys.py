"""Keys as they are pressed, from a terminal that is put back as it was."""

import os
import re
import select
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_ARROWS = {b"A": "up", b"B": "down"}
_KEY = re.compile(rb"\x1b[\[O](?P<arrow>[A-Z])|\x1b|(?P<plain>.)", re.DOTALL)


@contextmanager
def key_presses(descriptor: int) -> Iterator[Callable[[float], list[str]]]:
    """A function that waits for keys, some seconds at most: letters, `up` and `down`.

    Where the terminal has gone they are `q`.
    """
    before = termios.tcgetattr(descriptor)

    def wait(seconds: float) -> list[str]:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, seconds))
        return keys_of(os.read(descriptor, 256)) if ready else []

    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        # What was typed and not read is no command for the shell.
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


def keys_of(data: bytes) -> list[str]:
    """The names of the keys that gave these bytes; other keys than those named give none."""
    if not data:
        return ["q"]
    found = []
    for match in _KEY.finditer(data):
        arrow, plain = match["arrow"], match["plain"]
        name = _ARROWS.get(arrow, "") if arrow else (plain or b"").decode("ascii", "ignore")
        if name:
            found.append(name)
    return found
