from typing import Any, Generic, Literal, TypeVar

import msgspec

from hearth.runtime.batch import DecodingRow
from hearth.runtime.request import RowRound

StepKind = Literal["prefill", "decode", "verify", "tower"]
"""Prompt chunks, decode steps, verifications of token trees, and calls of the vision encoder."""
Event = TypeVar("Event")


class InFlightStep(msgspec.Struct, Generic[Event]):
    """Step queued on the device, until its result is reported.

    `event` is what the device will give, with what it takes to read it. `started` is in seconds of
    the monotonic clock, and `host_s` what the host took from there to queue the step. A call of the
    vision encoder has no rows, a step that could not be queued has an `error` in place of a result.
    """

    kind: StepKind
    rows: list[DecodingRow]
    event: Event
    started: float
    host_s: float
    lengths: list[int] = []
    """Tokens that the step puts into the caches of each row, where that is known by now."""
    computed: int = 0
    """Tokens that the engine runs in it, with padding."""
    first: int = 0
    """The place of its first row."""
    rounds: list[RowRound] = []
    """Rows that have speculated in it, once it is collected."""
    error: Exception | None = None
    unpicked: bool = False
    """True if its sampling is not queued: masks of its rows follow from tokens not read yet."""

    @property
    def filled(self) -> int:
        """Tokens that it puts into the caches."""
        return sum(self.lengths)

    @property
    def width(self) -> int:
        """Tokens that it computes for each row."""
        return self.computed // len(self.rows)

    @property
    def padding(self) -> int:
        """Tokens that it computes behind those of the row with the fewest."""
        return self.width - min(self.lengths) if self.lengths else 0


AnyStep = InFlightStep[Any]
"""A step of any kind, as the queue holds them."""
