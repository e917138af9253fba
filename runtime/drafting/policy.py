"""Whether a batch speculates: decided by the tokens a second of both ways, as measured here."""

from collections import deque
from statistics import median

_WINDOW = 32
"""The newest steps of a size and way, which tell its speed."""
_WARM_UP = 2
"""Steps of a size and way that never count."""
_FEWEST, _ENOUGH, _MOST = 3, 8, 24
"""Rounds that may condemn speculation, that decide a clear case, and that decide any."""
_STEPS = 12
"""Vanilla steps that are compared with."""
_HOPELESS, _CLEARLY_LOSING, _LOSING, _WINNING, _CLEARLY_WINNING = 0.7, 0.85, 0.98, 1.02, 1.25
"""Speeds against vanilla."""
_COST = 0.01
"""The share of time that trials may cost."""
_SHORTEST = 4
"""The least time between two trials, in lengths of a trial."""
_MOST_DOUBLINGS = 2
_TICK_S = 1e-9


class SpeculationPolicy:
    """Turns speculation off where it loses and on where it wins, for each batch size; no clock.

    It starts on and measures both ways. The losing way is tried again seldom: time lost by
    speculating is followed by at least 100 times as much vanilla decoding, more with each trial
    lost in a row. A size never measured begins as its nearest neighbour stands.
    """

    def __init__(self, max_batch: int) -> None:
        self._sizes: list[_SizePolicy | None] = [None] * (max_batch + 1)

    def wants(self, batch: int) -> bool:
        """Whether the next step of `batch` rows is to be a round of speculation."""
        return self._size(batch).wants

    def record_step(self, batch: int, seconds: float) -> None:
        """Take note of a vanilla step: one token a row."""
        self._size(batch).record_step(batch, seconds)

    def record_round(self, batch: int, tokens: int, seconds: float) -> None:
        """Take note of a round; `tokens` counts what it gave to all rows."""
        self._size(batch).record_round(tokens, seconds)

    def _size(self, batch: int) -> "_SizePolicy":
        size = self._sizes[batch]
        if size is None:
            size = self._sizes[batch] = _SizePolicy(self._neighbour_pause(batch))
        return size

    def _neighbour_pause(self, batch: int) -> float:
        """The pause of the nearest size that has decided; of two the larger, which gains less."""
        decided = [
            (abs(number - batch), -number, size.pause)
            for number, size in enumerate(self._sizes)
            if size is not None and size.decided
        ]
        return min(decided, default=(0, 0, 0.0))[2]


class _Rate:
    """Tokens a second of the newest steps: mean tokens over the median time.

    Another program's burst of work lengthens some steps, and then says nothing of the two ways.
    """

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._tokens: deque[int] = deque(maxlen=_WINDOW)
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self.value = 0.0

    @property
    def count(self) -> int:
        return len(self._tokens)

    def restart(self) -> None:
        """Measure afresh; the value stays until the first step."""
        self._tokens.clear()
        self._seconds.clear()

    def record(self, tokens: int, seconds: float) -> None:
        if self._warm_up:
            self._warm_up -= 1
            return
        self._tokens.append(tokens)
        self._seconds.append(seconds)
        self.value = sum(self._tokens) / self.count / max(median(self._seconds), _TICK_S)


class _SizePolicy:
    """One batch size: which way stands (`_on`), and whether the other is on trial.

    `pause` is the time in seconds from one trial of speculation to the next, 0 while it is on; it
    starts off where there is one.
    """

    def __init__(self, pause: float) -> None:
        self._on = not pause
        self._trial = False
        self._rounds, self._steps = _Rate(_WARM_UP), _Rate(_WARM_UP)
        self.pause = self._due = pause
        self._spent = 0.0
        self._unjudged = (0, 0.0)
        self._loss = 0.0
        self._lost_trials = 0
        # A vanilla trial has just ended, whatever asked for it.
        self._suspected = False
        self.decided = False

    @property
    def wants(self) -> bool:
        return self._on is not self._trial

    def record_step(self, rows: int, seconds: float) -> None:
        self._steps.record(rows, seconds)
        if self._on and self._trial:
            self._spent += seconds
            if self._steps.count >= _STEPS:
                self._end_trial()
        elif not self._on and not self._trial:
            self._due -= seconds
            # What the trial costs is told by the vanilla steps before it.
            if self._due <= 0 and self._steps.count >= _STEPS:
                self._begin_trial(self._rounds)

    def record_round(self, tokens: int, seconds: float) -> None:
        if not self.wants:
            # A request asked for it; rows that did not may have been among them.
            return
        self._rounds.record(tokens, seconds)
        self._count_loss(tokens, seconds)
        if self._trial:
            self._spent += seconds
            if self._enough_rounds:
                self._end_trial()
            return
        self._due -= seconds
        if self._suspected or self._due > 0:
            if self._steps.count >= _STEPS and self._enough_rounds:
                self._judge()
        elif self._rounds.count >= _FEWEST:
            self._begin_trial(self._steps)

    @property
    def _speed(self) -> float:
        """Tokens a second against vanilla's."""
        return self._rounds.value / self._steps.value if self._steps.value else 1.0

    @property
    def _enough_rounds(self) -> bool:
        count, speed = self._rounds.count, self._speed
        if count < _ENOUGH:
            return count >= _FEWEST and speed < _HOPELESS
        return count >= _MOST or not _CLEARLY_LOSING <= speed <= _CLEARLY_WINNING

    def _count_loss(self, tokens: int, seconds: float) -> None:
        """Time lost against vanilla since speculation last did well (a CUSUM chart)."""
        if self._steps.value:
            self._loss = max(0.0, self._loss + seconds - tokens / self._steps.value)
        else:
            self._unjudged = (self._unjudged[0] + tokens, self._unjudged[1] + seconds)

    def _begin_trial(self, rate: _Rate) -> None:
        rate.restart()
        self._trial = True
        self._spent = 0.0

    def _end_trial(self) -> None:
        self._trial = False
        tokens, seconds = self._unjudged
        self._unjudged = (0, 0.0)
        if seconds:
            self._count_loss(tokens, seconds)
        if self._on:
            self._stay_on()
            self._suspected = True
            if self.decided:
                # Both ways are to be compared as they are now.
                self._rounds.restart()
        else:
            self._decide(on=self._speed > _WINNING)

    def _stay_on(self) -> None:
        """Set when vanilla steps are measured next; they cost what speculation would gain."""
        gain = self._spent * max(0.0, 1 - 1 / self._speed)
        self._due = max(gain / _COST, self._spent * _SHORTEST)

    def _judge(self) -> None:
        """Speculation that seems to lose is compared with vanilla steps of now, then decided."""
        if self._suspected:
            self._suspected = False
            self._decide(on=self._speed >= _LOSING)
        elif self._speed < _LOSING:
            self._begin_trial(self._steps)

    def _decide(self, *, on: bool) -> None:
        self.decided = True
        if on:
            self.pause = 0.0
            self._lost_trials = 0
            self._loss = 0.0
            if not self._on:
                self._on = True
                self._stay_on()
            return
        doubled = 2 ** min(self._lost_trials, _MOST_DOUBLINGS)
        self._lost_trials += self._speed < _CLEARLY_LOSING
        self.pause = self._due = doubled * max(self._loss / _COST, self._spent * _SHORTEST)
        self._loss = 0.0
        self._on = False
