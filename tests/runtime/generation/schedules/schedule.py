"""Random schedules: which rows come when, and what becomes of them. Pure data."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

Option = TypeVar("Option")
Fault = Literal["none", "before", "behind", "draft", "decode"]
FAULTS: tuple[Fault, ...] = ("before", "behind", "draft", "decode")


class Absence(msgspec.Struct, frozen=True):
    """A row is released `after` steps at its place, and waits again `away` borders later."""

    after: int
    away: int


class PlannedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row: what it asks, the border at which it waits for the first time, and how it leaves.

    `voice` is the number of its prompt and sampling options, `tokens` its limit, 0 for all that
    fit. It is cancelled `cancel` steps after it was placed, for the last time if it is released.
    """

    voice: int
    arrives: int
    tokens: int
    logprobs: int | None = None
    speculation: bool | None = None
    absences: tuple[Absence, ...] = ()
    cancel: int | None = None


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """What happens at which border; a border is the moment before a step.

    `together` admits all rows that are due by one call. Prefill steps number `failing` raise:
    before the engine runs, behind it, or where the draft follows; or so do decode steps and rounds,
    and all rows are lost. At the borders `overfull` one
    row more is offered than there are places, which has to be refused and change nothing.
    """

    rows: tuple[PlannedRow, ...]
    together: bool = True
    fault: Fault = "none"
    failing: tuple[int, ...] = ()
    overfull: tuple[int, ...] = ()


class Bounds(NamedTuple):
    """How large a schedule may get."""

    voices: int
    rows: int = 10
    tokens: int = 20
    borders: int = 6
    """Between two arrivals, and steps before a row leaves: up to twice that."""
    whole: float = 0.05
    """The share of rows without a limit of their own."""


class Choices:
    """Decisions read from bytes: fewer and smaller bytes make a simpler schedule."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def below(self, bound: int) -> int:
        """A number from 0 to `bound` - 1."""
        number = next(self._bytes, 0)
        if bound > 256:
            number = number << 8 | next(self._bytes, 0)
        return number % bound

    def often(self, share: float) -> bool:
        """Whether a thing happens that does in this share of all cases."""
        return next(self._bytes, 0) >= 256 * (1 - share)

    def of(self, options: Sequence[Option]) -> Option:
        """One of these."""
        return options[self.below(len(options))]


def draw_schedule(choices: Choices, bounds: Bounds) -> Schedule:
    """The schedule that these choices make."""
    rows, arrives = [], 0
    for _ in range(1 + choices.below(bounds.rows)):
        arrives += choices.below(bounds.borders) if choices.often(0.6) else 0
        rows.append(_draw_row(choices, bounds, arrives))
    failing: tuple[int, ...] = ()
    fault: Fault = "none"
    if choices.often(0.25):
        fault = choices.of(FAULTS)
        failing = tuple(choices.below(2 * len(rows)) for _ in range(1 + choices.below(2)))
    return Schedule(
        rows=tuple(rows),
        together=not choices.often(0.4),
        fault=fault,
        failing=failing,
        overfull=tuple(choices.below(4 * bounds.borders) for _ in range(choices.below(2))),
    )


def _draw_row(choices: Choices, bounds: Bounds, arrives: int) -> PlannedRow:
    absences: tuple[Absence, ...] = ()
    cancel = None
    if choices.often(0.3):
        absences = tuple(
            Absence(choices.below(2 * bounds.borders), choices.below(bounds.borders))
            for _ in range(1 + choices.below(3))
        )
    if choices.often(0.2):
        cancel = choices.below(2 * bounds.borders)
    return PlannedRow(
        voice=choices.below(bounds.voices),
        arrives=arrives,
        tokens=0 if choices.often(bounds.whole) else 1 + choices.below(bounds.tokens),
        logprobs=choices.of((20, 3, 0, None)),
        speculation=choices.of((None, None, True, False)),
        absences=absences,
        cancel=cancel,
    )
