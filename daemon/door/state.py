"""What all parts of the front door read: state, facts, counters, and this run's epoch."""

import secrets
import time
from collections import Counter

from actors.messages import ExecutorMetrics
from daemon.door.settings import DoorFacts, State

_EPOCH_BYTES = 8


class DoorState:
    """The daemon writes `state`, `facts` and `metrics`; the door counts in `totals`."""

    def __init__(self, facts: DoorFacts) -> None:
        self.state: State = "starting"
        self.facts = facts
        self.metrics: ExecutorMetrics | None = None
        self.totals: Counter[str] = Counter()
        self.epoch = secrets.token_hex(_EPOCH_BYTES)
        self._started = time.monotonic()

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started
