"""What the daemon does now, for its owner."""

import os
import resource
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from daemon.control.messages import MOST_REQUESTS, Cancelled, CancelRequest, Top, TopReport
from daemon.door.front_door import FrontDoor
from daemon.door.overview import generations, open_clients, running_request, tokens_of_replies
from daemon.metrics.collector import Look
from daemon.tracing.history import History
from runtime.prefix.metrics import PrefixMetrics

_ERRORS = 8


class Overview:
    """Answers `Top` and `CancelRequest`."""

    def __init__(
        self, door: FrontDoor, history: History, look: Callable[[], Awaitable[Look]]
    ) -> None:
        self._door = door
        self._history = history
        self._look = look

    async def answer(self, _asked: Top) -> TopReport:
        """The report of this moment."""
        look = await self._look()
        state, sessions, load = self._door.state, self._door.sessions, look.load
        now = time.monotonic()
        running = generations(sessions)
        prefix = (look.executor and look.executor.prefix) or PrefixMetrics()
        return TopReport(
            server=state.facts.server,
            model=state.facts.model,
            state=state.life.state,
            stage=state.life.stage,
            share=state.life.share,
            reason=state.life.reason,
            now=now,
            uptime_s=state.uptime_s,
            places=load.places if load else 0,
            running=load.running if load else 0,
            queued=load.queued if load else 0,
            queued_tokens=load.queued_tokens if load else 0,
            tokens=tokens_of_replies(sessions, state),
            open=len(running),
            restarts=look.restarts,
            totals=dict(look.totals),
            refusals=dict(look.refusals),
            memory=_memory(look),
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


def _memory(look: Look) -> dict[str, int]:
    found = {"daemon": _resident(os.getpid()), "free": look.free}
    if look.executor_pid is not None:
        found["executor"] = _resident(look.executor_pid)
    if look.executor is not None and look.executor.device_free is not None:
        found["device free"] = look.executor.device_free
    if look.pictures is not None:
        found["pictures"] = look.pictures
    return found


def _resident(pid: int) -> int:
    """Bytes of a process that lie in RAM; 0 for one that is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_bytes().split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()
