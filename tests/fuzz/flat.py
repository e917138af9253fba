"""Whether memory stays flat while messages come."""

import gc
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.fuzz.doors import DOORS, PER_TYPE
from tests.fuzz.mutations import Encode, mutations

_PARTS = 4

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


def all_mutations(door: str, encode: Encode, given: Mapping[str, Any]) -> Iterator[bytes]:
    """Mutations of all types that a door takes; memory has to stay flat behind the first quarter.

    Who takes them has dealt with each by the time that it asks for the next.
    """
    told, flat, before = 0, None, 0
    for part in range(_PARTS):
        for kind in DOORS[door]:
            for data in mutations(kind, f"{kind} {part}", -(-PER_TYPE // _PARTS), encode, given):
                yield data
                told += 1
        if flat is None:
            flat, before = Flat(), told
    assert flat is not None
    flat.check(told - before)
    assert told >= PER_TYPE * len(DOORS[door])


def _blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()
