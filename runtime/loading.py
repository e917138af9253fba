"""Progress of loading an engine folder."""

from collections.abc import Callable
from typing import Literal

Stage = Literal["verifying", "opening", "compiling", "capturing", "answering"]
Told = Callable[[Stage, float | None], None]
"""Callback with the stage, and its share done from 0 to 1, None where that is not known."""


def nobody(_stage: Stage, _share: float | None) -> None:
    """Do nothing: the callback of those who want no progress."""
