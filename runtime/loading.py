"""How far an engine folder has come on its way to an engine that has worked."""

from collections.abc import Callable
from typing import Literal

Stage = Literal["verifying", "opening", "compiling", "capturing", "answering"]
Told = Callable[[Stage, float | None], None]
"""Who is told the stage, and from 0 to 1 how much of it is done, where that is known."""


def nobody(_stage: Stage, _share: float | None) -> None:
    """For those who load without telling."""
