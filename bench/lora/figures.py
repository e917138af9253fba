"""What `bench lora` finds out; pure."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

MOST_SWITCH_MS = 1.0
MOST_COST = 1.1
MOST_COST_NONE = 1.02
MOST_COST_SHIPPED = 1.5


class Turn(NamedTuple):
    """Seconds of a decode step, measured one after the other.

    `plain` is that of an engine without adapters, `none` of one that takes them and has none
    active, `adapted` of the same with one active.
    """

    plain: float
    none: float
    adapted: float


class Switches(NamedTuple):
    """`seconds` of each switch until the device is done with it, and decode steps without a graph.

    `first` are the seconds of the decode steps that came first behind the switches, `others` those
    of the steps behind them.
    """

    seconds: Sequence[float]
    first: Sequence[float]
    others: Sequence[float]
    misses: int


class LoraFigures(msgspec.Struct, kw_only=True):
    """An engine with adapters of up to a rank; `step_cost` is over a step without adapters.

    `first_step_cost` is a decode step that comes first behind a switch over those behind it, a
    median as all others. `switches` were made, between adapters and none.
    """

    switch_ms: float
    step_cost: float
    step_cost_none: float
    graph_misses_per_switch: float
    first_step_cost: float
    plain_ms: float
    none_ms: float
    adapted_ms: float
    rank: int
    switches: int
    dtype: str = ""

    def missed(self, *, shipped: bool) -> list[str]:
        """The aims that are missed; those of the shipped model are its own."""
        limits = (
            ("switch_ms", self.switch_ms, MOST_SWITCH_MS),
            ("step_cost", self.step_cost, MOST_COST_SHIPPED if shipped else MOST_COST),
            (
                "step_cost_none",
                self.step_cost_none,
                MOST_COST_SHIPPED if shipped else MOST_COST_NONE,
            ),
            ("graph_misses_per_switch", self.graph_misses_per_switch, 0.0),
        )
        return [f"{name} is {at:.4g}, at most {most:g}" for name, at, most in limits if at > most]


def lora_figures(turns: Sequence[Turn], switches: Switches, rank: int) -> LoraFigures:
    """The figures of some turns and switches."""
    return LoraFigures(
        switch_ms=1000 * median(switches.seconds),
        step_cost=median(one.adapted / one.plain for one in turns),
        step_cost_none=median(one.none / one.plain for one in turns),
        graph_misses_per_switch=switches.misses / len(switches.seconds),
        first_step_cost=median(switches.first) / median(switches.others),
        plain_ms=1000 * median(one.plain for one in turns),
        none_ms=1000 * median(one.none for one in turns),
        adapted_ms=1000 * median(one.adapted for one in turns),
        rank=rank,
        switches=len(switches.seconds),
    )
