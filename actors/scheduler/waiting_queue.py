from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hearth.actors.scheduler.request_state import RequestState, RequestStatus


@dataclass(slots=True)
class _Line:
    """Waiting requests of one client for one adapter, in order; `head` is the first, if known."""

    prompt_tokens: int = 0
    order: list[tuple[float, int]] = field(default_factory=list)
    head: tuple[float, int] | None = None


class WaitingQueue:
    """Waiting requests in order of priority with ageing: first come, first served.

    A request that waits `ageing_s` seconds counts as one priority higher: requests are ordered by
    their virtual arrivals. A client has a line for each adapter. All requests have `status`.
    """

    def __init__(self, ageing_s: float, status: RequestStatus = RequestStatus.WAITING) -> None:
        self._ageing_s, self._status = ageing_s, status
        self._entries: dict[int, RequestState] = {}
        self._lines: dict[int, dict[str, _Line]] = {}
        # The first of each line by virtual arrival.
        self._heads: list[tuple[float, int]] = []
        self._deadlines: dict[int, float] = {}
        self.prompt_tokens = 0
        self.adapters: Counter[str] = Counter()
        """Number of waiting requests by adapter, without zeros."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._entries.values())

    def __contains__(self, rid: int) -> bool:
        return rid in self._entries

    def get(self, rid: int) -> RequestState | None:
        """The request of this number; None if it does not wait."""
        return self._entries.get(rid)

    @property
    def oldest(self) -> float | None:
        """Time at which the request that waits longest came; None if none waits."""
        return min((entry.queued for entry in self), default=None)

    @property
    def first(self) -> RequestState | None:
        """The request that is next; None if none waits."""
        return self._entries[self._heads[0][1]] if self._heads else None

    @property
    def order(self) -> float:
        """Virtual arrival of the request that is next; infinite if none waits."""
        return self._heads[0][0] if self._heads else math.inf

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a waiting request."""
        return min(self._deadlines.values(), default=None)

    def tokens_of(self, client: int) -> int:
        """The prompt tokens that a client has waiting."""
        return sum(line.prompt_tokens for line in self._lines.get(client, {}).values())

    def count_of(self, client: int) -> int:
        """Number of requests that a client has waiting."""
        return sum(len(line.order) for line in self._lines.get(client, {}).values())

    def virtual_arrival(self, priority: int, since: float) -> float:
        """Arrival of a request of priority 0 that would have the same order as this one."""
        return since - priority * self._ageing_s

    def push(self, entry: RequestState) -> None:
        """Add a request, ordered by its priority and by the time since which it is queued."""
        line = self._lines.setdefault(entry.client, {}).setdefault(entry.adapter, _Line())
        self._entries[entry.rid] = entry
        entry.status, entry.placed_at, entry.first_token_at = self._status, None, None
        insort(line.order, self._place(entry))
        self._settle(entry, line)
        self.adapters[entry.adapter] += 1
        self.prompt_tokens += entry.prompt_tokens
        line.prompt_tokens += entry.prompt_tokens
        if entry.request.deadline is not None:
            self._deadlines[entry.rid] = entry.request.deadline

    @property
    def heads(self) -> list[tuple[float, RequestState]]:
        """The first request of each client's lines with its virtual arrival, in order."""
        return [(arrival, self._entries[rid]) for arrival, rid in self._heads]

    def remove(self, rid: int) -> RequestState | None:
        """Take one request out; None when it does not wait."""
        entry = self._entries.get(rid)
        if entry is not None:
            line = self._lines[entry.client][entry.adapter]
            del line.order[bisect_left(line.order, self._place(entry))]
            line.prompt_tokens -= entry.prompt_tokens
            self._settle(entry, line)
            del self._entries[rid]
            self._deadlines.pop(rid, None)
            self.prompt_tokens -= entry.prompt_tokens
            self.adapters[entry.adapter] -= 1
            if not self.adapters[entry.adapter]:
                del self.adapters[entry.adapter]
        return entry

    def take_expired(self, now: float) -> list[RequestState]:
        """Take out the requests whose deadline has passed."""
        expired = [rid for rid, deadline in self._deadlines.items() if deadline <= now]
        return [entry for rid in expired if (entry := self.remove(rid)) is not None]

    def _settle(self, entry: RequestState, line: _Line) -> None:
        """Update the head of this request's line."""
        if line.head is not None:
            del self._heads[bisect_left(self._heads, line.head)]
        if not line.order:
            own = self._lines[entry.client]
            del own[entry.adapter]
            if not own:
                del self._lines[entry.client]
            return
        line.head = line.order[0]
        insort(self._heads, line.head)

    def _place(self, entry: RequestState) -> tuple[float, int]:
        return self.virtual_arrival(entry.priority, entry.queued), entry.rid


class RequestQueues:
    """The waiting requests: in `unready` for embeddings of images, in `queue` for a slot."""

    def __init__(self, ageing_s: float) -> None:
        self.queue = WaitingQueue(ageing_s)
        self.unready = WaitingQueue(ageing_s, RequestStatus.WAITING_FOR_IMAGES)

    def __len__(self) -> int:
        return len(self.queue) + len(self.unready)

    def __iter__(self) -> Iterator[RequestState]:
        yield from self.queue
        yield from self.unready

    def __contains__(self, rid: int) -> bool:
        return rid in self.queue or rid in self.unready

    @property
    def prompt_tokens(self) -> int:
        """The prompt tokens of all waiting requests."""
        return self.queue.prompt_tokens + self.unready.prompt_tokens

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a waiting request; None without one."""
        deadlines = (self.queue.next_deadline, self.unready.next_deadline)
        return min((one for one in deadlines if one is not None), default=None)

    def tokens_of(self, client: int) -> int:
        """The prompt tokens that a client has waiting."""
        return self.queue.tokens_of(client) + self.unready.tokens_of(client)

    def push(self, entry: RequestState) -> None:
        """Add a request to `unready` if it has images, else to `queue`."""
        (self.unready if entry.images else self.queue).push(entry)

    def remove(self, rid: int) -> RequestState | None:
        """Take one request out; None when it does not wait."""
        return self.queue.remove(rid) or self.unready.remove(rid)

    def take_expired(self, now: float) -> list[RequestState]:
        """Take out the requests whose deadline has passed."""
        return self.queue.take_expired(now) + self.unready.take_expired(now)
