"""Watchdog: notifies the service manager that the daemon is alive, or that it starts or stops."""

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import anyio

from hearth.daemon.service_state import ServiceState, words


def tell_state(state: ServiceState) -> None:
    """Set the status line that the manager shows for the service."""
    notify(f"STATUS={words(*state)}")


@contextmanager
def reloading() -> Iterator[None]:
    """Notify the manager of the begin and the end of a reload; the service must have been ready."""
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notify(f"RELOADING=1\nMONOTONIC_USEC={now}")
    try:
        yield
    finally:
        notify("READY=1")


def notify(
    message: str, environ: Mapping[str, str] | None = None, *, patience_s: float = 0.2
) -> None:
    """Send `message`, such as `READY=1`, to the manager's socket; does nothing without one.

    Where the manager is behind it is waited for, `patience_s` seconds at most.
    """
    address = (os.environ if environ is None else environ).get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        # An abstract socket: its name begins with a zero byte.
        address = f"\0{address[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
        manager.settimeout(patience_s)
        try:
            manager.sendto(message.encode(), address)
        except OSError:
            # A manager that is gone or does not read is no reason to stop serving.
            return


_SLACK_S = 10.0
"""Seconds that a supervisor may be late: it waits for others for five seconds at most."""
_WINDOW_S = 15.0
"""Seconds by which the manager's timeout is extended at once: a daemon that hangs stops asking."""
_TICK_S = 1.0
"""Seconds between two notifications while a start or a stop goes on."""


class LoopHealth(NamedTuple):
    """Health of a supervisor's loop, in seconds of its own clock.

    `turned` is when its loop last turned, and `due` when it has to act next, if it has to.
    """

    now: float
    turned: float
    due: float | None


def is_well(health: LoopHealth) -> bool:
    """True if the supervisor's loop turns and none of its deadlines is overdue."""
    overdue = health.due is not None and health.now > health.due + _SLACK_S
    return health.now - health.turned <= _SLACK_S and not overdue


def worst(all_health: Iterable[LoopHealth]) -> LoopHealth:
    """The first that is not well, else the first."""
    found = list(all_health)
    return next((health for health in found if not is_well(health)), found[0])


def watched_s(environ: Mapping[str, str]) -> float | None:
    """Watchdog interval of this process in seconds, as by sd_watchdog_enabled(3)."""
    interval = environ.get("WATCHDOG_USEC", "")
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(interval) / 1e6 if interval.isdecimal() and int(interval) else None


class Watchdog:
    """Notifies the manager while the event loop, which runs it, turns and the supervisor is well.

    So an executor that hangs is the supervisor's business, and a daemon that hangs the manager's.
    A start is extended up to `load_s()` of the supervisor's clock.
    """

    def __init__(
        self,
        health: Callable[[], LoopHealth],
        load_s: Callable[[], float],
        environ: Mapping[str, str],
    ) -> None:
        self._health = health
        self._watched_s = watched_s(environ)
        self._last: Callable[[], float] | None = load_s
        self._wake = anyio.Event()

    def serves(self) -> None:
        """Note the end of the start."""
        self._last = None

    def stops(self, within_s: float) -> None:
        """Note that a stop has begun that takes at most `within_s`."""
        until = self._health().now + within_s
        self._last = lambda: until
        self._wake.set()

    @property
    def pause_s(self) -> float:
        """Seconds until the next notification: at least three in the manager's interval."""
        return min(math.inf if self._last is None else _TICK_S, (self._watched_s or math.inf) / 3)

    def words(self) -> list[str]:
        """Notifications that are due now."""
        health = self._health()
        said = []
        if is_well(health):
            if self._watched_s is not None:
                said.append("WATCHDOG=1")
            until = None if self._last is None else self._last()
            if until is not None and health.now < until:
                wait_s = min(_WINDOW_S, until - health.now)
                said.append(f"EXTEND_TIMEOUT_USEC={math.ceil(wait_s * 1e6)}")
        return said

    async def run(self) -> None:
        """Send notifications at their interval until cancelled."""
        while True:
            said = self.words()
            if said:
                # It is said again soon.
                notify("\n".join(said), patience_s=0)
            with anyio.move_on_after(self.pause_s):
                await self._wake.wait()
            self._wake = anyio.Event()
