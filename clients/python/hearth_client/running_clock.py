"""Time by which the silence of others is judged."""

from collections.abc import Callable
from time import monotonic


class RunningClock:
    """Seconds that this process ran, as far as its readings show; starts at 0.

    Of the time between two readings at most `most_s` counts: a waiting reader reads it at least
    that often. A process that was stopped (a paused machine, a frozen service, a debugger) so takes
    no more than that for the silence of others, which may have been stopped with it.
    """

    def __init__(self, most_s: float, source: Callable[[], float] = monotonic) -> None:
        self.most_s = most_s
        self._source = source
        self._seen = source()
        self._now = 0.0

    def now(self) -> float:
        """The time that has counted so far."""
        seen = self._source()
        self._now += min(seen - self._seen, self.most_s)
        self._seen = seen
        return self._now
