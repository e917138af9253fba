"""Durations of steps by the host's clock, and the time to queue the next one."""

import time
from collections import deque
from collections.abc import Iterable

import msgspec

from hearth.runtime.batch import DecodingRow
from hearth.runtime.ewma import Ewma
from hearth.runtime.generation.in_flight import AnyStep
from hearth.runtime.request import RowToken


class StageMetrics(msgspec.Struct):
    """Counters of one stage (prefill, generation) since the start.

    `host_seconds` were spent on queueing steps, while the device may be at work on others.
    `tokens` of prompts were computed, and `reused` ones came from the prefix cache in their place.
    Those of the generation were given to rows: no token behind a reply's end, no proposal that was
    refused. A row's first token is the prefill's.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0
    reused: int = 0

    def record(self, tokens: int, seconds: float, host_seconds: float = 0.0) -> None:
        """Count one step."""
        self.host_seconds += host_seconds
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds


_NEWEST = 0.1
"""Weight of the newest step in the moving average of decode times."""
_LEAD_S = 0.0005
"""Seconds before the end of a step by which the next one has to be queued at the latest."""
_EVERY = 16
_KEPT = 3


class StepTimes:
    """Record every step that was collected."""

    def __init__(self) -> None:
        self.prefill = StageMetrics()
        self.generation = StageMetrics()
        """Decode and verify steps."""
        self.decode_s = Ewma(_NEWEST)
        """Seconds of a decode or verify step."""
        self.collected = 0.0
        """Monotonic time at which the last step was collected."""
        self._queue_time = QueueTime()

    def queue_by(self, host_s: float) -> float:
        """Monotonic time to queue a step behind one that took `host_s` to queue."""
        return self.collected + self._queue_time.behind(host_s)

    def began(self, started: float) -> float:
        """Time at which the device began a step queued at `started`, behind the one before it."""
        return max(started, self.collected)

    def admitted(self, rows: Iterable[DecodingRow]) -> None:
        """Note on rows that they were admitted now."""
        now = time.monotonic()
        for row in rows:
            row.placed, row.prefill_from = now, self.prefill.seconds

    def first_tokens(
        self, rows: Iterable[DecodingRow], tokens: Iterable[RowToken]
    ) -> tuple[dict[int, float], dict[int, int]]:
        """Note on rows that a prefill, recorded before, gave them their first tokens.

        Returns, by row number, the times at which they were admitted, and the tokens that came from
        the prefix cache, where any did.
        """
        given = {token.row: token.error for token in tokens}
        slot_times, cached = dict[int, float](), dict[int, int]()
        for row in rows:
            if row.number not in given:
                continue
            row.paid_from = self.generation.seconds + self.prefill.seconds - row.prefill_from
            slot_times[row.number] = row.placed
            if row.reused and given[row.number] is None:
                cached[row.number] = row.reused
        return slot_times, cached

    def record(self, step: AnyStep, tokens: int = 0) -> tuple[float, float]:
        """Record a step that was collected just now, and return when it began and ended.

        A prefill counts computed tokens, a decode or verify step the `tokens` that rows got.
        """
        began = max(step.started, self.collected)
        ended = self.collected = time.monotonic()
        seconds = ended - began
        if step.kind == "prefill":
            self.prefill.record(step.filled, seconds, step.host_s)
        elif step.kind != "tower":
            self.generation.record(tokens, seconds, step.host_s)
            self.decode_s.add(seconds)
            if step.kind == "decode":
                self._queue_time.record(seconds)
        return began, ended


class QueueTime:
    """Estimate the end of a decode step from steps behind which the next one was queued at once.

    Of any other only the time at which it was read is known, not its end: a wait that was too long
    would be taken for the step's own time, and never become shorter. So one step of `_EVERY` has
    the next one queued at once, and the shortest of the last `_KEPT` of these counts: a stall that
    met one of them says nothing of the others.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def record(self, seconds: float) -> None:
        """Record a decode step that ended `seconds` after the one before."""
        if self._turn == 0:
            self._seconds.append(seconds)
        self._turn = (self._turn + 1) % _EVERY

    def behind(self, host_s: float) -> float:
        """Seconds to wait after the end of a step before queueing the next but one; 0 for none.

        `host_s` are the seconds that queueing took the last time.
        """
        if self._turn == 0:
            return 0.0
        return max(0.0, min(self._seconds) - max(_LEAD_S, 2 * host_s))
