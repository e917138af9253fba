from typing import Any, Generic, Literal, TypeVar

import msgspec

from hearth.runtime.batch import DecodingRow
from hearth.runtime.request import RowRound

StepKind = Literal["prefill", "decode", "verify", "tower"]
"""Prompt chunks, decode steps, verifications of token trees, and calls of the vision encoder."""
Event = TypeVar("Event")


class InFlightStep(msgspec.Struct, Generic[Event]):
    """Step queued on the device, until its result is reported.

    `event` is the pending result, with the means to read it. `started` is the monotonic time at
    which the host began to queue the step, and `host_s` the seconds that it took. A call of the
    vision encoder has no rows; a step that could not be queued has an `error` instead of a result.
    """

    kind: StepKind
    rows: list[DecodingRow]
    event: Event
    started: float
    host_s: float
    lengths: list[int] = []
    """Tokens that the step puts into the caches of each row; empty while they are not known."""
    computed: int = 0
    """Tokens that the engine computes in the step, padding included."""
    first: int = 0
    """The place of the step's first row."""
    rounds: list[RowRound] = []
    """Rounds of the rows that have speculated in the step, once it is collected."""
    error: Exception | None = None
    unpicked: bool = False
    """True if its sampling is not queued: masks of its rows follow from tokens not read yet."""

    @property
    def filled(self) -> int:
        """Tokens that the step puts into the caches of all rows."""
        return sum(self.lengths)

    @property
    def width(self) -> int:
        """Tokens that the step computes for each row."""
        return self.computed // len(self.rows)

    @property
    def padding(self) -> int:
        """Padding tokens that the step computes for the row with the fewest tokens."""
        return self.width - min(self.lengths) if self.lengths else 0


AnyStep = InFlightStep[Any]
"""A step of any kind, as the queue holds it."""
