"""The other side of `JsonProcess`: what a process answers to the program that started it."""

import os
from typing import Any

import msgspec


class Replies:
    """Lines of JSON on what was standard output, which from now on is standard error.

    So nothing that a library prints ends up between them.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def send(self, reply: Any) -> None:
        """Write one line."""
        self._file.write(msgspec.json.encode(reply) + b"\n")
        self._file.flush()
