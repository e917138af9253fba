from collections.abc import Sequence
from typing import NamedTuple, Protocol

from runtime.request import RowRequest


class RowMove(NamedTuple):
    """Row `source` becomes row `target`; its first `used` slots are kept."""

    source: int
    target: int
    used: int


class Seat(NamedTuple):
    """A new row takes a place; nothing of it is in a cache yet."""

    place: int
    request: RowRequest


class Stale(NamedTuple):
    """Slots [begin, end) of a place that may hold numbers that are not finite."""

    place: int
    begin: int
    end: int


class Arrangement(NamedTuple):
    """How the rows of a batch are placed anew between two steps.

    The places 0 to `rows` - 1 are taken from then on. Moves happen in their order: each target is
    free by its turn, rows go up or down, and a row moves once. What a move keeps counts slots of
    the base's cache; an owner that knows lengths of its own goes by those. Stale slots are zeroed
    when all rows have moved.
    """

    rows: int
    moves: Sequence[RowMove] = ()
    seats: Sequence[Seat] = ()
    stale: Sequence[Stale] = ()

    @classmethod
    def fresh(cls, requests: Sequence[RowRequest]) -> "Arrangement":
        """An empty house in which these take the places 0, 1, ..."""
        return cls(len(requests), seats=[Seat(*seat) for seat in enumerate(requests)])


class RowOwner(Protocol):
    """Keeps state by the place of a row: caches, the sampler, a proposer."""

    def rearrange(self, arrangement: Arrangement) -> None:
        """Let rows move, and new ones take their seats."""
