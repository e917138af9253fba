"""Every type of message that a door or an inbox takes, and how many mutations each gets."""

from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args

from hearth.actors import messages, supervisor_messages
from hearth.daemon.control.messages import ControlRequest
from hearth_client.protocol import ClientMessage

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
