"""Retry times of refused clients, from what the front door observes; no clock, no I/O."""

from bisect import bisect_right, insort
from collections import Counter, deque

from hearth.actors.settings import PolicySettings, Reloadable
from hearth.runtime.ewma import Ewma

LEAST_S = 0.05
MOST_S = 60.0
"""Bounds of every retry time, in seconds."""
GRACE_S = 0.5
"""Seconds past its retry time that a place is kept for a client."""
_WINDOW = 64
_GUESS_S = 0.1
_LOAD_GUESS_S = 5.0
_TICKETS_PER_CLIENT = 4
_KEPT_SHARE = 4
"""At most a fourth of the queue is kept for retries: not all clients retry."""
_APART = 1.1
"""Retry times are so much further apart than places free, which they do at random."""
_MEMORY = 32
"""Number of retry times over which the share of clients that retry is averaged, exponentially."""


class Pace:
    """The mean time from one end to the next while there is work, over the last 64."""

    def __init__(self) -> None:
        # By seconds of work; the first is no end but what the others are counted from.
        self._ends = deque([0.0], maxlen=_WINDOW + 1)
        self._worked_s = 0.0
        self._since: float | None = None

    def works(self, now: float, *, working: bool) -> None:
        """Start, or stop, to count time as time with work."""
        self._worked_s = self._worked(now)
        self._since = now if working else None

    def ended(self, now: float) -> None:
        """Count one end."""
        self._ends.append(self._worked(now))

    def seconds(self, now: float) -> float:
        """Seconds from one end to the next; before the first a guess, or the time that it takes."""
        spent = self._worked(now) - self._ends[0]
        ends = len(self._ends) - 1
        return spent / ends if ends else max(spent, _GUESS_S)

    def _worked(self, now: float) -> float:
        return self._worked_s + (0.0 if self._since is None else now - self._since)


class RetryAfter:
    """Gives every refused client a retry time of its own, and keeps a place for it then.

    Places free at the pace at which generations end, one for each retry time, in their order. A
    client that comes without a retry time does not get a place that is kept, so that one which
    asks without rest takes none from one that waits. A client is known by its session's number,
    times are seconds of the monotonic clock.
    """

    def __init__(self, queue: Reloadable[PolicySettings], now: float) -> None:
        self._queue = queue
        self._requests, self._clients = Pace(), Pace()
        self._clients.works(now, working=True)
        # Retry times, each with its client.
        self._tickets: list[tuple[float, int]] = []
        self._held: Counter[int] = Counter()
        self._share_that_comes = Ewma(1 / _MEMORY, 1.0)
        # Newest retry time of a client that had retried in time before.
        self._second = 0.0
        # Newest retry time of each client that has too many requests open.
        self._own: dict[int, float] = {}
        self._ready = False
        self._lost_at = now
        self._load_s = _LOAD_GUESS_S
        self._stops_at: float | None = None

    def works(self, now: float, *, working: bool) -> None:
        """Note if generations are open."""
        self._requests.works(now, working=working and self._ready)

    def ended(self, now: float) -> None:
        """Note the end of an accepted generation."""
        self._requests.ended(now)

    def client_left(self, client: int, now: float) -> None:
        """Note the end of a session."""
        self._clients.ended(now)
        self._own.pop(client, None)
        for ticket in [one for one in self._tickets if one[1] == client]:
            self._remove(ticket)

    def executor(self, now: float, *, ready: bool, working: bool) -> None:
        """Note if an executor is ready; `working` where generations are open."""
        if ready and not self._ready:
            self._load_s = now - self._lost_at
        elif self._ready and not ready:
            self._lost_at = now
        self._ready = ready
        self.works(now, working=working)

    def stops(self, ended: float) -> None:
        """Note that the daemon will have stopped at `ended`."""
        self._stops_at = ended

    def admits(self, client: int, free: int, now: float) -> bool:
        """True if a client may take one of `free` places of the queue; uses up its retry time."""
        while self._tickets and self._tickets[0][0] < now - GRACE_S:
            self._note(self._tickets[0], came=False)
        due = self._due(now)
        mine = next((one for one in due if one[1] == client), None)
        if mine is not None and free > 0:
            self._note(mine, came=True)
            return True
        if free <= min(len(due), self._queue.current.queue_requests // _KEPT_SHARE):
            return False
        if client in self._held:
            # It needs no retry time for this one any more.
            self._remove(next(one for one in reversed(self._tickets) if one[1] == client))
        return True

    def after(
        self, code: str, client: int, now: float, *, ahead: int = 0, own: int = 1, open_now: int = 1
    ) -> float | None:
        """Seconds after which a client refused with `code` may retry; None where that is vain.

        `ahead` requests have to end first where that is known; `own` of `open_now` generations are
        the client's.
        """
        match code:
            case "queue_full":
                seconds = self._ticket(client, now, max(ahead, 1))
            case "too_many_requests":
                seconds = self._until_one_ends(client, now, own, open_now)
            case "too_many_clients":
                seconds = self._clients.seconds(now)
            case "executor_failed":
                seconds = self._until_ready(now)
            case "encoder_failed":
                # It has less to load.
                seconds = self._load_s
            case "shutting_down":
                seconds = max((self._stops_at or now) - now, 0.0) + self._load_s
            case _:
                return None
        return round(min(max(seconds, LEAST_S), MOST_S), 3)

    def _until_one_ends(self, client: int, now: float, own: int, open_now: int) -> float:
        begins = now + self._until_ready(now)
        each = self._requests.seconds(now) * max(open_now, 1) / max(own, 1)
        at = min(max(self._own.get(client, begins), begins) + each, begins + own * each)
        self._own[client] = at
        return at - now

    def _ticket(self, client: int, now: float, ahead: int) -> float:
        each = self._requests.seconds(now)
        begins = now + self._until_ready(now)
        if mine := [one for one in self._due(now) if one[1] == client]:
            # It retried in time and found no place: it goes before those that retry later.
            self._remove(mine[0])
            at = self._second = max(self._second, begins) + each
        elif self._held[client] >= _TICKETS_PER_CLIENT:
            return max(at for at, who in self._tickets if who == client) - now
        else:
            # Where many do not retry, more get a time.
            last = self._tickets[-1][0] if self._tickets else 0.0
            last += _APART * each * self._share_that_comes.value
            at = min(max(last, begins + ahead * each), begins + MOST_S)
        insort(self._tickets, (at, client))
        self._held[client] += 1
        return at - now

    def _due(self, now: float) -> list[tuple[float, int]]:
        return self._tickets[: bisect_right(self._tickets, (now + LEAST_S, 1 << 62))]

    def _note(self, ticket: tuple[float, int], *, came: bool) -> None:
        self._share_that_comes.add(came)
        self._remove(ticket)

    def _remove(self, ticket: tuple[float, int]) -> None:
        self._tickets.remove(ticket)
        self._held[ticket[1]] -= 1
        if not self._held[ticket[1]]:
            del self._held[ticket[1]]

    def _until_ready(self, now: float) -> float:
        """Seconds that the last executor took to load; beyond that, as long again as it is late."""
        return 0.0 if self._ready else max(abs(self._lost_at + self._load_s - now), LEAST_S)
