from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from actors.messages import Request
from runtime.request import RowRequest


@dataclass(slots=True)
class Entry:
    """One admitted request, waiting or running, with the tokens generated so far."""

    request: Request
    token_ids: list[int]
    arrived: float
    queued: float
    generated: list[int] = field(default_factory=list)
    started: bool = False
    accepted: bool = False
    digest: bytes = b""

    @property
    def rid(self) -> int:
        """The request's number."""
        return self.request.rid

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt in tokens."""
        return len(self.token_ids)

    def to_row(self) -> RowRequest:
        """The row that starts or continues this request."""
        return RowRequest(
            token_ids=self.token_ids + self.generated,
            prompt_length=self.prompt_tokens,
            options=self.request.options,
        )


def lowest_priority(entries: Iterable[Entry]) -> int | None:
    """The lowest priority of some requests; None when there are none."""
    return min((entry.request.priority for entry in entries), default=None)


class WaitingQueue:
    """Waiting requests in order of priority with ageing.

    A request that waits `ageing_s` seconds counts as one priority higher. The order of two
    requests then never changes: it is that of their virtual arrivals.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._entries: dict[int, Entry] = {}
        self._order: list[tuple[float, int]] = []
        self._deadlines: dict[int, float] = {}
        self.prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def oldest(self) -> float | None:
        """When the request that waits longest came; None when none waits."""
        # Entries are pushed with a clock that never goes back.
        return next((entry.queued for entry in self), None)

    @property
    def first_arrival(self) -> float | None:
        """The virtual arrival of the request that is next; None when none waits."""
        return self._order[0][0] if self._order else None

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a waiting request."""
        return min(self._deadlines.values(), default=None)

    def virtual_arrival(self, priority: int, queued: float) -> float:
        """When a request of priority 0 must have come to stand where this one stands."""
        return queued - priority * self._ageing_s

    def push(self, entry: Entry) -> None:
        """Add a request, behind all of its priority that wait."""
        self._entries[entry.rid] = entry
        insort(self._order, self._place(entry))
        self.prompt_tokens += entry.prompt_tokens
        if entry.request.deadline is not None:
            self._deadlines[entry.rid] = entry.request.deadline

    def remove(self, rid: int) -> Entry | None:
        """Take one request out; None when it does not wait."""
        entry = self._entries.pop(rid, None)
        if entry is not None:
            del self._order[bisect_left(self._order, self._place(entry))]
            self._deadlines.pop(rid, None)
            self.prompt_tokens -= entry.prompt_tokens
        return entry

    def first(self, count: int) -> list[Entry]:
        """The first `count` requests in order."""
        return [self._entries[rid] for _, rid in self._order[:count]]

    def take(self, count: int) -> list[Entry]:
        """Take out the first `count` requests in order."""
        chosen = self.first(count)
        for entry in chosen:
            self.remove(entry.rid)
        return chosen

    def take_expired(self, now: float) -> list[Entry]:
        """Take out the requests whose deadline has passed."""
        expired = [rid for rid, deadline in self._deadlines.items() if deadline <= now]
        return [entry for rid in expired if (entry := self.remove(rid)) is not None]

    def _place(self, entry: Entry) -> tuple[float, int]:
        return self.virtual_arrival(entry.request.priority, entry.queued), entry.rid
