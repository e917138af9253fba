from __future__ import annotations

from hearth.actors.actor_message import FromExecutor
from hearth.actors.encoder_messages import TowerFailed, TowerRan
from hearth.actors.messages import (
    ExecutorGone,
    RowsEnded,
    RowsFailed,
    RowsPlaced,
    RowsReturned,
    Step,
)
from hearth.runtime.request import RowToken

Told = RowsPlaced | RowsEnded | RowsFailed | RowsReturned | TowerRan | TowerFailed
"""What the scheduler has to hear of rows, and of the tower."""


class ExecutorWord:
    """What the tokenizer has heard of the executor's rows; no I/O.

    Who hears tokens first is the one who can say, when an executor has died, which rows had begun
    for the world outside.
    """

    def __init__(self) -> None:
        self._gone = 0
        self._placed: set[int] = set()

    def heeds(self, message: FromExecutor) -> bool:
        """Whether the message counts: what comes of an executor that has gone does not."""
        return message.incarnation > self._gone or message.incarnation == 0

    def passes_on(self, message: FromExecutor) -> Told | None:
        """What the scheduler has to hear, as far as it does not know it yet."""
        match message:
            case RowsPlaced():
                self._placed.update(message.rids)
                return message
            case Step():
                tokens = zip(message.rids, message.tokens, strict=False)
                ended = [rid for rid, token in tokens if is_last(token)]
                begun = [rid for rid in message.placed if rid not in ended]
                if not ended and not begun:
                    return None
                self._placed.difference_update(ended)
                return RowsEnded(message.incarnation, ended, begun)
            case RowsEnded() | RowsFailed():
                self._placed.difference_update(message.rids)
                return message if message.incarnation else None
            case RowsReturned():
                self._placed.difference_update(row.rid for row in message.released)
                return message
        return message if isinstance(message, TowerRan | TowerFailed) else None

    def bury(self, message: ExecutorGone) -> list[RowsFailed | RowsReturned]:
        """What became of the rows that an executor was offered before it died."""
        begun = [rid for rid in message.offered if rid in self._placed]
        unplaced = [rid for rid in message.offered if rid not in self._placed]
        self._gone = message.incarnation
        self._placed.clear()
        told: list[RowsFailed | RowsReturned] = []
        if begun:
            told.append(RowsFailed(self._gone, begun, "executor_failed", message.message))
        if unplaced:
            told.append(RowsReturned(self._gone, unplaced=unplaced))
        return told


def is_last(token: RowToken) -> bool:
    """Whether the executor's row ended with this token."""
    return token.finish is not None or token.error is not None
