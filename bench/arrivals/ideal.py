"""The least that requests would have to wait: a pure first-come model of the places."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice
from typing import NamedTuple

from bench.arrivals.workload import Ask


class Calls(NamedTuple):
    """Seconds of the engine's calls: a decode step; a prefill, and more for each of its tokens.

    `prefill_mean_s` is what the measured prefills took, tokens included.
    """

    decode_s: float
    prefill_s: float
    prefill_token_s: float = 0.0
    prefill_mean_s: float = 0.0

    def prefill(self, tokens: int) -> float:
        """Seconds of a prefill of so many tokens."""
        return self.prefill_s + tokens * self.prefill_token_s


class Served(NamedTuple):
    """A request and when each of its tokens came, in seconds from the begin."""

    ask: Ask
    times: list[float]

    @property
    def ttft(self) -> float:
        """Seconds from the request to its first token."""
        return self.times[0] - self.ask.at


def first_come(
    asks: Iterable[Ask],
    calls: Calls,
    places: int,
    following: Callable[[float], Ask | None] = lambda _: None,
) -> list[Served]:
    """Serve requests, which come in the order of their times, in `places` that are never idle.

    At the border of two calls whoever waits takes the free places. All of them share one prefill
    call, which gives their first token; calls of prefill and decode take turns where both have
    something to do. Nothing else takes time. `following(now)` is asked for another request when
    one has ended.
    """
    waiting = deque(asks)
    joining: list[Served] = []
    running: list[Served] = []
    served: list[Served] = []
    now, prefilled = 0.0, False
    while waiting or joining or running:
        if not joining and not running:
            now = max(now, waiting[0].at)
        while waiting and waiting[0].at <= now and len(joining) + len(running) < places:
            joining.append(Served(waiting.popleft(), []))
            served.append(joining[-1])
        prefilled = bool(joining) and not (prefilled and running)
        if prefilled:
            now += calls.prefill(sum(row.ask.prompt_tokens for row in joining))
            called, joining = joining, []
            running += called
        else:
            now += calls.decode_s
            called = running
        for row in called:
            row.times.append(now)
        ended = sum(len(row.times) == row.ask.tokens for row in running)
        running = [row for row in running if len(row.times) < row.ask.tokens]
        waiting.extend(ask for _ in range(ended) if (ask := following(now)) is not None)
    return served


def in_turn(
    asks: Sequence[Ask], calls: Calls, places: int, clients: int, seconds: float
) -> list[Served]:
    """Serve clients of which each sends its next request when the last one has ended.

    They take `asks` over and over, until `seconds` have passed.
    """
    source = cycle(asks)

    def following(now: float) -> Ask | None:
        return next(source)._replace(at=now) if now < seconds else None

    return first_come(list(islice(source, clients)), calls, places, following)
