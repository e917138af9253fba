from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import anyio

from actors.mailbox import MailboxFull, Sender
from actors.messages import ActorProgress, ExecutorLimits, SupervisorMessage

PROGRESS_S = 1.0
"""Seconds between two signs of progress of an actor with an event loop."""


class Loaded(NamedTuple):
    """An actor that can work: its loop, and what to tell of it.

    `run` ends by itself on SIGTERM when `stop` is None, else after a call of `stop`.
    """

    run: Callable[[], None]
    stop: Callable[[], None] | None = None
    facts: Mapping[str, str | int | float] = MappingProxyType({})
    limits: ExecutorLimits | None = None


def run_in_event_loop(
    name: str,
    work: Callable[[], Coroutine[Any, Any, None]],
    to_supervisor: Sender[SupervisorMessage],
) -> None:
    """Run an actor in an event loop of its own until SIGTERM, with signs of progress."""

    async def main() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work)
                tasks.start_soon(_tell_progress, name, to_supervisor)
                async for _ in signals:
                    tasks.cancel_scope.cancel()

    anyio.run(main, backend_options={"use_uvloop": True})


async def _tell_progress(name: str, to_supervisor: Sender[SupervisorMessage]) -> None:
    turns = 0
    while True:
        turns += 1
        try:
            to_supervisor.post(ActorProgress(name, turns, busy=False))
        except MailboxFull:
            # A supervisor that is behind has unread signs of progress enough.
            await anyio.sleep(PROGRESS_S)
        await anyio.sleep(PROGRESS_S)
