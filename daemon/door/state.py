"""What all parts of the front door read: state, facts, clock, counters, and this run's epoch."""

import secrets
import time
from collections import Counter

import anyio
from hearth_client.running_clock import RunningClock

from actors.logs import request_id
from actors.messages import SchedulerReport
from actors.settings import PolicySettings, Reloadable
from actors.supervisor_messages import ExecutorMetrics
from daemon.door.facts import DoorFacts
from daemon.door.pictures import Pictures
from daemon.door.settings import DoorSettings
from daemon.life import Life

_EPOCH_BYTES = 8
_MOST_S = 0.5
"""What a pause of the daemon counts of a client's lease; the door reads the clock far oftener."""


class DoorState:
    """The daemon writes `life`, `facts` and `metrics`; the door counts in `totals`.

    `tokens` are those of all replies that have ended. `refusals` counts by code what was refused
    before it was accepted. `load` is the scheduler's newest report to the daemon itself, and
    `reported` is set by the next one.

    `clock` is for how long clients neither speak nor read. Deadlines of requests are promises to
    the world outside and go by the monotonic clock. `pictures` is None where the model sees none.
    `queue` are the scheduler's limits of what may wait.
    """

    def __init__(
        self,
        facts: DoorFacts,
        settings: DoorSettings,
        queue: PolicySettings,
        pictures: Pictures | None = None,
    ) -> None:
        self.life = Life()
        self.facts = facts
        self.settings = Reloadable(settings)
        self.queue = Reloadable(queue)
        self.pictures = pictures
        self.metrics: ExecutorMetrics | None = None
        self.clock = RunningClock(_MOST_S)
        self.totals: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.load: SchedulerReport | None = None
        self.reported = anyio.Event()
        self.tokens = 0
        self.epoch = secrets.token_hex(_EPOCH_BYTES)
        self._started = time.monotonic()

    def request_id(self, rid: int) -> str:
        """The id of a request in the whole daemon, for clients, logs, journal and traces."""
        return request_id(self.epoch, rid)

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started
