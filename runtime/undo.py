"""Giving back what was taken when a thing cannot be made whole."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from hearth.runtime.errors import HearthError


@contextmanager
def undoing() -> Iterator[ExitStack]:
    """A stack whose callbacks run when the block fails, and not when it ends.

    The block's own error is the one that is raised: what an undoing raises says less.
    """
    undo = ExitStack()
    try:
        yield undo
    except BaseException:
        with suppress(HearthError):
            undo.close()
        raise
