"""Progress of loading an engine folder."""

from collections.abc import Callable
from typing import Literal

Stage = Literal["verifying", "opening", "compiling", "capturing", "answering"]
ProgressCallback = Callable[[Stage, float | None], None]
"""Callback with the stage, and the share of it that is done, 0 to 1; None if it is not known."""


def no_progress(_stage: Stage, _share: float | None) -> None:
    """Ignore the progress of loading."""
