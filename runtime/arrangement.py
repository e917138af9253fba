from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from runtime.errors import HearthError
from runtime.request import RowRequest

Kept = TypeVar("Kept")


class RowMove(NamedTuple):
    """Row `source` becomes row `target`; its first `used` slots are kept."""

    source: int
    target: int
    used: int


class Seat(NamedTuple):
    """A new row takes a place; its first `filled` tokens are put there from the prefix cache.

    So are the first `drafted` entries of a draft engine.
    """

    place: int
    request: RowRequest
    filled: int = 0
    drafted: int = 0


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

    def settle(self, kept: Sequence[Kept], seat: Callable[[Seat], Kept]) -> list[Kept]:
        """What an owner keeps of each row, by place, when all have moved and new ones are seated.

        Raises `internal` where a row would be lost on its way, or a place have none or two.
        """
        places, settled = dict(enumerate(kept)), set[int]()
        for source, target, _ in self.moves:
            if target in settled or source in settled or source not in places:
                raise HearthError("internal", f"rows cannot move so: {list(self.moves)}")
            places[target] = places.pop(source)
            settled.add(target)
        for one in self.seats:
            if one.place in settled:
                raise HearthError("internal", f"place {one.place} is given to two rows")
            places[one.place] = seat(one)
            settled.add(one.place)
        if not settled.issubset(range(self.rows)) or not places.keys() >= set(range(self.rows)):
            raise HearthError("internal", f"the places of {self.rows} rows are not 0, 1, ...")
        return [places[place] for place in range(self.rows)]


class RowOwner(Protocol):
    """Keeps state by the place of a row: caches, the sampler, a proposer."""

    def rearrange(self, arrangement: Arrangement) -> None:
        """Let rows move, and new ones take their seats."""
