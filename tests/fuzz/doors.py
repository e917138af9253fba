"""Messages that doors and inboxes take, how many mutations each gets, and flat memory."""

import gc
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from hearth.actors import messages, supervisor_messages
from hearth.daemon.control.messages import ControlRequest
from hearth_client.protocol import ClientMessage
from tests.fuzz.mutations import Encode, mutations

ALL = 300_000
AT_LEAST = 3_000


def kinds_of(union: Any) -> tuple[Any, ...]:
    """The types of a union, or the one that stands alone."""
    return get_args(union) or (union,)


def _inboxes() -> Mapping[str, tuple[Any, ...]]:
    """By name, what actors and their supervisor take: unions, and one that is alone."""
    names = vars(messages) | vars(supervisor_messages)
    unions = {name: one for name, one in names.items() if isinstance(one, UnionType)}
    named = {name: kinds_of(one) for name, one in unions.items()}
    return named | {"ExecutorMessage": kinds_of(messages.ExecutorMessage)}


DOORS: Mapping[str, tuple[Any, ...]] = {
    "ClientMessage": kinds_of(ClientMessage),
    **_inboxes(),
    # Other tests have requests of their own.
    "ControlRequest": tuple(
        kind
        for kind in ControlRequest.__subclasses__()
        if kind.__module__ == ControlRequest.__module__
    ),
}
TYPES = sum(map(len, DOORS.values()))
PER_TYPE = max(AT_LEAST, -(-ALL // TYPES))
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
