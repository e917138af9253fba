"""Whether memory stays flat while messages come."""

import gc
import resource
import sys
from pathlib import Path

_BLOCKS_A_MESSAGE = 0.2
_RSS = 48 << 20


class Flat:
    """Looked at when everything has been seen once, and again behind `messages` more.

    An object that is kept for each message is a block of the interpreter's memory or more.
    """

    def __init__(self) -> None:
        self._blocks, self._resident = _blocks(), _resident()

    def check(self, messages: int) -> None:
        """Raise where something grows with the number of messages."""
        grown = _blocks() - self._blocks
        assert grown < _BLOCKS_A_MESSAGE * messages, f"{grown} blocks behind {messages} messages"
        assert _resident() - self._resident < _RSS


def _blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()
