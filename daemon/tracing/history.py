"""The generations that ended last, for the owner to look at."""

import time
from collections import deque
from itertools import islice

from msgspec import structs

from daemon.control.messages import Trace, TraceReport
from daemon.door.finished import FinishedRequest
from runtime.errors import HearthError

LIMIT = 1000
"""Of records without a client's options: each has less than 1 KiB."""


class History:
    """The last `LIMIT` records of generations, the newest last; no text of theirs is in it."""

    def __init__(self) -> None:
        self._kept: deque[FinishedRequest] = deque(maxlen=LIMIT)

    def add(self, ended: FinishedRequest) -> None:
        """Keep the record of a generation that has ended."""
        self._kept.append(structs.replace(ended, options=None))

    def failures(self, most: int) -> list[FinishedRequest]:
        """The newest that failed, the newest last."""
        found = (ended for ended in reversed(self._kept) if ended.failed)
        return list(islice(found, most))[::-1]

    async def answer(self, asked: Trace) -> TraceReport:
        """The record asked for, or the newest ones; raises `unknown_request`."""
        if not asked.request:
            newest = list(self._kept)[-asked.last :] if asked.last else []
            return TraceReport(newest, time.monotonic())
        for ended in self._kept:
            if ended.request == asked.request:
                return TraceReport([ended], time.monotonic())
        text = (
            f"{asked.request[:40]!r} is none of the last {LIMIT} requests that have ended: "
            "hearth trace lists the newest, the log has all"
        )
        raise HearthError("unknown_request", text, "request")
