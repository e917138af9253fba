"""Overview of the daemon for its owner: running requests, and the last ended ones."""

import os
import resource
import time
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path

from msgspec import structs

from hearth.daemon.control.messages import (
    MOST_REQUESTS,
    Cancelled,
    CancelRequest,
    Top,
    TopReport,
    Trace,
    TraceReport,
)
from hearth.daemon.door.finished import FinishedRequest
from hearth.daemon.door.front_door import FrontDoor
from hearth.daemon.door.overview import (
    generations,
    open_clients,
    running_request,
    tokens_of_replies,
)
from hearth.daemon.observe.metrics.collector import DaemonSnapshot
from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics

LIMIT = 1000
"""Most records that are kept; without a client's options each has less than 1 KiB."""


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
        """The record of one request, or the newest records; raises `unknown_request`."""
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


_ERRORS = 8


class Overview:
    """Answers `Top` and `CancelRequest`."""

    def __init__(
        self, door: FrontDoor, history: History, snapshot: Callable[[], Awaitable[DaemonSnapshot]]
    ) -> None:
        self._door = door
        self._history = history
        self._snapshot = snapshot

    async def answer(self, _asked: Top) -> TopReport:
        """The report of this moment."""
        snapshot = await self._snapshot()
        state, sessions, load = self._door.state, self._door.sessions, snapshot.load
        now = time.monotonic()
        running = generations(sessions)
        prefix = (snapshot.executor and snapshot.executor.prefix) or PrefixMetrics()
        return TopReport(
            server=state.facts.server,
            model=state.facts.model,
            state=state.service_state.state,
            stage=state.service_state.stage,
            share=state.service_state.share,
            reason=state.service_state.reason,
            now=now,
            uptime_s=state.uptime_s,
            places=load.places if load else 0,
            running=load.running if load else 0,
            queued=load.queued if load else 0,
            queued_tokens=load.queued_tokens if load else 0,
            tokens=tokens_of_replies(sessions, state),
            open=len(running),
            restarts=snapshot.restarts,
            totals=dict(snapshot.totals),
            refusals=dict(snapshot.refusals),
            memory=_memory(snapshot),
            clients=open_clients(sessions),
            requests=[running_request(one, state, now) for one in running[:MOST_REQUESTS]],
            errors=self._history.failures(_ERRORS),
            prefix_queried=prefix.queried,
            prefix_reused=prefix.reused,
        )

    async def cancel(self, asked: CancelRequest) -> Cancelled:
        """End a request; raises `unknown_request`."""
        self._door.cancel(asked.request)
        return Cancelled(asked.request)


def _memory(snapshot: DaemonSnapshot) -> dict[str, int]:
    found = {"daemon": _resident(os.getpid()), "free": snapshot.free}
    if snapshot.executor_pid is not None:
        found["executor"] = _resident(snapshot.executor_pid)
    if snapshot.executor is not None and snapshot.executor.device_free is not None:
        found["device free"] = snapshot.executor.device_free
    if snapshot.pictures is not None:
        found["pictures"] = snapshot.pictures
    return found


def _resident(pid: int) -> int:
    """Resident bytes of a process; 0 if it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_bytes().split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()
