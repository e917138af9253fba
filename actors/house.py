from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from actors.executor_messages import Revoke
from actors.waiting_queue import Entry


@dataclass(slots=True)
class HeldRow:
    """A request that the executor has been offered; `placed` is since when it has a place.

    `arrival` is its virtual arrival, `order` that by which it gets a place. `asked` is what the
    executor has been asked to do with it and has not answered yet. One that is `alone` shares the
    house with nobody. It has had its first token at `begun`; one that was told to give way does so
    whatever its prefill has cost.
    """

    entry: Entry
    incarnation: int
    arrival: float
    order: float
    alone: bool = False
    placed: float | None = None
    begun: float | None = None
    asked: Literal["", "revoke", "release", "give way", "cancel"] = ""

    @property
    def rid(self) -> int:
        """The request's number."""
        return self.entry.rid

    @property
    def priority(self) -> int:
        """The request's priority."""
        return self.entry.priority

    @property
    def client(self) -> int:
        """The client's number."""
        return self.entry.client

    @property
    def paid(self) -> float:
        """From when on it has had its place for as long again as its prompt took, by about."""
        if self.begun is None or self.placed is None:
            return math.inf
        return 2 * self.begun - self.placed

    @property
    def deadline(self) -> float | None:
        """The request's deadline."""
        return self.entry.request.deadline

    def is_due(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and self.deadline <= now


class House:
    """What the executor holds: rows offered and rows placed; no clock, no I/O.

    A row is held until the executor, or who saw it die, has said what became of it.
    """

    def __init__(self, *, ageing_s: float, hold_s: float) -> None:
        self._ageing_s, self.hold_s = ageing_s, hold_s
        self._rows: dict[int, HeldRow] = {}
        self.places = 0
        # Who takes a first place, until it has been lined up.
        self.claimant: Entry | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[HeldRow]:
        return iter(self._rows.values())

    @property
    def closed(self) -> bool:
        """Whether a row is held that runs alone."""
        return len(self._rows) == 1 and next(iter(self)).alone

    @property
    def offered(self) -> list[HeldRow]:
        """The rows that the executor will place, in its order."""
        waiting = [row for row in self if row.placed is None and not row.asked]
        return sorted(waiting, key=lambda row: row.order)

    @property
    def staying(self) -> list[HeldRow]:
        """The placed rows that nobody has asked to leave."""
        return [row for row in self if row.placed is not None and not row.asked]

    @property
    def waiting(self) -> list[HeldRow]:
        """The offered rows for which there is no place yet: they wait as those of the queue do."""
        behind = sum(row.asked != "cancel" for row in self) - self.places
        return self.offered[-behind:] if behind > 0 else []

    @property
    def unplaced(self) -> int:
        """How many rows have no place, those included that are on their way back."""
        return sum(row.placed is None for row in self)

    @property
    def running(self) -> int:
        """How many places are taken by requests that go on."""
        running = sum(row.placed is not None and row.asked != "cancel" for row in self)
        # A place is given away while the last token of its row is still being told.
        return min(running, self.places)

    def next_of(self, heads: Iterable[tuple[float, Entry]]) -> tuple[float, float, Entry] | None:
        """Who of these first requests of clients is to be lined up next: order, arrival, request.

        That is the `claimant`, before all others, where it is among them.

        Each row of its client that is lined up ahead takes a priority off a request, so that
        others who come meanwhile go between them.
        """
        lined_up: dict[int, list[HeldRow]] = {}
        for row in self.offered:
            lined_up.setdefault(row.client, []).append(row)
        ranked = []
        for place, (arrival, entry) in enumerate(heads):
            own = lined_up.get(entry.client, [])
            ahead = [row.order for row in own if row.arrival <= arrival]
            order = max([arrival + len(ahead) * self._ageing_s, *ahead])
            if entry is self.claimant:
                order = -math.inf
            ranked.append((order, arrival, place, entry))
        if not ranked:
            return None
        order, arrival, _, entry = min(ranked)
        return order, arrival, entry

    def add(self, row: HeldRow) -> None:
        """The row is offered."""
        self._rows[row.rid] = row
        if row.entry is self.claimant:
            self.claimant = None

    def get(self, rid: int) -> HeldRow | None:
        """The row of a request, if it is held."""
        return self._rows.get(rid)

    def remove(self, rid: int) -> None:
        """The row has left, or has been given back."""
        del self._rows[rid]

    def clear(self) -> list[HeldRow]:
        """Take all rows out."""
        rows, self._rows = list(self), {}
        return rows

    def next_in(self) -> HeldRow | None:
        """The first offered row for which no place is free nor about to be; None when none is."""
        placed = [row for row in self if row.placed is not None]
        if len(placed) < self.places:
            return None
        ahead = sum(row.asked != "" for row in placed)
        return next(iter(self.offered[ahead:]), None)

    def release_times(self, arrival: float, priority: int) -> list[tuple[float, HeldRow]]:
        """From when on each placed row gives way to one that waits, of this arrival and priority.

        A row holds its place for the hold limit, unless the other has a higher priority, and until
        it would stand behind it when put back. One whose prompt is still read would not leave soon:
        it is asked only where all others are like it.
        """
        times = []
        for held in [row for row in self.staying if row.begun is not None] or self.staying:
            behind = arrival + held.priority * self._ageing_s
            limit = (held.placed or 0.0) + self.hold_s
            times.append((behind if priority > held.priority else max(behind, limit), held))
        return times

    def batch_release_times(self, order: float) -> list[tuple[float, HeldRow]]:
        """From when on all rows of a synchronous batch give way to one that waits."""
        staying = self.staying
        if not staying:
            return []
        due = min(held.placed or 0.0 for held in staying) + self.hold_s
        if len(staying) == self.places:
            # A full batch goes on until its lowest row, put back, would stand behind the other.
            due = max(due, order + min(held.priority for held in staying) * self._ageing_s)
        return [(due, held) for held in staying]


def revoke(rows: list[HeldRow]) -> list[Revoke]:
    """Ask for offered rows back."""
    for row in rows:
        row.asked = "revoke"
    return [Revoke([row.rid for row in rows])] if rows else []
