"""Policy that lets a batch speculate by the measured tokens a second of both ways."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec

from hearth.runtime.request import RowRound


class EagleGenerationMetrics(msgspec.Struct):
    """Counters of speculation since the start, for any method.

    `steps` counts verifications of a batch, `rounds` verifications of a row. `accepted` counts the
    tokens that rounds gave, `accepted_by_position[i]` the rounds that gave more than i tokens.
    """

    steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = []
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0

    @property
    def accept_length(self) -> float:
        """Tokens a verification of one row; 0 before the first."""
        return accept_length(self.rounds, self.accepted)

    @property
    def accept_rates(self) -> list[float]:
        """Shares of rounds that gave more than i tokens, for each i; empty without rounds."""
        if not self.rounds:
            return []
        return [count / self.rounds for count in self.accepted_by_position]

    def record(
        self, rows: Sequence[RowRound], *, draft_s: float, verify_s: float, commit_s: float
    ) -> None:
        """Count one round of a batch: its speculating rows, and the seconds of each stage."""
        self.steps += 1
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.commit_s += commit_s
        for row in rows:
            self._record_row(row)

    def _record_row(self, row: RowRound) -> None:
        self.rounds += 1
        self.drafted += row.drafted
        self.accepted += row.accepted
        missing = row.accepted - len(self.accepted_by_position)
        self.accepted_by_position += [0] * missing
        for position in range(row.accepted):
            self.accepted_by_position[position] += 1


def accept_length(rounds: int, accepted: int) -> float:
    """Tokens a round; 0 if there was no round."""
    return accepted / rounds if rounds else 0.0


_State = Literal["on", "measuring", "suspected", "off", "trying"]
"""State of a batch size, the steps that it runs, and the next states.

on: rounds; measuring, once they seem to lose or it is time to compare
measuring: vanilla steps; suspected, once there are enough of them
suspected: rounds; on or off, once there are enough to compare with these steps
off: vanilla steps; trying, once it is time
trying: rounds; on or off, once there are enough
"""
_WINDOW = 32  # newest steps of a size and way, which tell its speed
_WARM_UP = 2  # steps of a size and way that never count
_FEWEST, _ENOUGH, _MOST = 3, 8, 24  # rounds that may condemn, decide a clear case, decide any
_STEPS = 12  # vanilla steps that are compared with
# Speeds against vanilla.
_HOPELESS, _CLEARLY_LOSING, _LOSING, _WINNING, _CLEARLY_WINNING = 0.7, 0.85, 0.98, 1.02, 1.25
_COST = 0.01  # the share of time that trials may cost
_SHORTEST = 4  # the least time between two trials, in lengths of a trial
_LONGEST = 1_000_000  # the most steps between two trials, whatever their times say
_MOST_DOUBLINGS = 2
_TICK_S = 1e-9


class SpeculationPolicy:
    """Turns speculation off if it loses time, on if it gains, for each batch size; no clock.

    It starts on and measures both ways. The losing way is tried again seldom: time lost by
    speculating is followed by at least 100 times as much vanilla decoding, more with each trial
    lost in a row. A size never measured begins in the state of its nearest neighbour.
    """

    def __init__(self, max_batch: int) -> None:
        self._sizes: list[_SizePolicy | None] = [None] * (max_batch + 1)

    def wants(self, batch: int) -> bool:
        """Return True if the next step of `batch` rows is to be a round of speculation."""
        return self._size(batch).wants

    def record_step(self, batch: int, seconds: float) -> None:
        """Record a vanilla step: one token a row."""
        self._size(batch).record_step(batch, seconds)

    def record_round(self, batch: int, tokens: int, seconds: float) -> None:
        """Record a round; `tokens` counts the tokens of all rows."""
        # A round with less than one a row, of which some failed, tells nothing.
        if tokens >= batch:
            self._size(batch).record_round(tokens, seconds)

    def _size(self, batch: int) -> "_SizePolicy":
        size = self._sizes[batch]
        if size is None:
            # The nearest size that has decided tells; of two the larger, which gains less.
            decided = [
                (abs(number - batch), -number, known.pause)
                for number, known in enumerate(self._sizes)
                if known is not None and known.decided
            ]
            size = self._sizes[batch] = _SizePolicy(min(decided, default=(0, 0, 0.0))[2])
        return size


class _Rate:
    """Tokens a second of the newest steps: mean tokens over the median time.

    Another program's burst of work lengthens some steps, and then says nothing of the two ways.
    """

    def __init__(self) -> None:
        self._warm_up = _WARM_UP
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
    """One batch size.

    `pause` is the time in seconds from one trial of speculation to the next, 0 while speculation is
    on; with a pause it starts off. `decided` is True once both ways have been compared.
    """

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self.decided = False
        self._state: _State = "off" if pause else "on"
        self._rounds, self._steps = _Rate(), _Rate()
        self._wait(pause)
        self._spent = 0.0
        self._loss = 0.0
        self._unpriced = 0
        self._lost_trials = 0

    @property
    def wants(self) -> bool:
        return self._state not in {"measuring", "off"}

    def record_step(self, rows: int, seconds: float) -> None:
        self._steps.record(rows, seconds)
        enough = self._steps.count >= _STEPS
        if self._state == "measuring":
            self._spent += seconds
            if enough:
                self._suspect()
        # The cost of the trial is measured by the vanilla steps before it.
        elif self._state == "off" and self._waited(seconds) and enough:
            self._begin("trying", self._rounds)

    def record_round(self, tokens: int, seconds: float) -> None:
        if not self.wants:
            # A request asked for it; rows that did not may have been among them.
            return
        self._rounds.record(tokens, seconds)
        self._count_loss(tokens, seconds)
        waited = self._waited(seconds)
        if self._state == "trying":
            self._spent += seconds
        if self._state == "on" and waited:
            if self._rounds.count >= _FEWEST:
                self._begin("measuring", self._steps)
        elif self._enough_rounds:
            self._judge()

    def _judge(self) -> None:
        if self._state == "trying":
            self._decide(on=self._speed > _WINNING)
        elif self._state == "suspected":
            self._decide(on=self._speed >= _LOSING)
        elif self._steps.count >= _STEPS and self._speed < _LOSING:
            self._begin("measuring", self._steps)

    @property
    def _speed(self) -> float:
        """Tokens a second against vanilla's; 1 before both were measured."""
        steps, rounds = self._steps.value, self._rounds.value
        return rounds / steps if steps and rounds else 1.0

    @property
    def _enough_rounds(self) -> bool:
        count, speed = self._rounds.count, self._speed
        if count < _ENOUGH:
            return count >= _FEWEST and speed < _HOPELESS
        return count >= _MOST or not _CLEARLY_LOSING <= speed <= _CLEARLY_WINNING

    def _count_loss(self, tokens: int, seconds: float) -> None:
        """Time lost against vanilla since speculation last did well (a CUSUM chart)."""
        self._loss += seconds
        self._unpriced += tokens
        if self._steps.value:
            self._loss = max(0.0, self._loss - self._unpriced / self._steps.value)
            self._unpriced = 0

    def _begin(self, state: _State, rate: _Rate) -> None:
        rate.restart()
        self._state, self._spent = state, 0.0

    def _suspect(self) -> None:
        self._state = "suspected"
        self._count_loss(0, 0.0)
        self._wait_on()
        if self.decided:
            # Both ways are to be compared as they are now.
            self._rounds.restart()

    def _decide(self, *, on: bool) -> None:
        if not on:
            doubled = 2 ** min(self._lost_trials, _MOST_DOUBLINGS)
            self._lost_trials += self._speed < _CLEARLY_LOSING
            self.pause = doubled * max(self._loss / _COST, self._spent * _SHORTEST)
            self._wait(self.pause)
        else:
            if self._state == "trying":
                self._wait_on()
            self.pause = 0.0
            self._lost_trials = 0
        self._state, self._loss, self.decided = "on" if on else "off", 0.0, True

    def _wait_on(self) -> None:
        """Set the time of the next vanilla steps: measuring them costs the gain of speculation."""
        self._wait(self._spent * max((1 - 1 / self._speed) / _COST, _SHORTEST))

    def _wait(self, seconds: float) -> None:
        """Let the other way be tried after this time."""
        self._due, self._left = seconds, _LONGEST

    def _waited(self, seconds: float) -> bool:
        self._due -= seconds
        self._left -= 1
        return self._due <= 0 or self._left <= 0
