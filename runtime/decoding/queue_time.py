"""When to queue the next step while another one runs; no clock."""

from collections import deque

_LEAD_S = 0.0005
"""Before the end of a step in which the next one has to be queued, if that takes no longer."""
_EVERY = 16
_KEPT = 3


class QueueTime:
    """Expects the end of a decode step by those behind which the next one was queued at once.

    Of any other it is not known when it ended, only when somebody looked: a wait that was too long
    would be taken for the step's own time, and never become shorter. So one step of `_EVERY` has
    the next one queued at once, and the shortest of the last `_KEPT` of these counts: a stall that
    met one of them says nothing of the others.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def record(self, seconds: float) -> None:
        """A decode step has ended so long after the one before."""
        if self._turn == 0:
            self._seconds.append(seconds)
        self._turn = (self._turn + 1) % _EVERY

    def behind(self, host_s: float) -> float:
        """How long after the end of a step to queue the next but one; 0 for at once.

        `host_s` is what queueing took the last time.
        """
        if self._turn == 0:
            return 0.0
        return max(0.0, min(self._seconds) - max(_LEAD_S, 2 * host_s))
