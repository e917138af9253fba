"""Signals of the daemon: requests to stop and to reload."""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import anyio
import structlog

from hearth.runtime.errors import HearthError

_log = structlog.get_logger("hearth")


class SignalRequests:
    """Requests by signals: SIGTERM and SIGINT to stop, SIGHUP to reload or to stop.

    Under a service manager SIGHUP reloads. Elsewhere it says that the terminal has closed, which
    asks for a stop unless it is ignored, as nohup(1) has it.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._reloads = bool(environ.get("NOTIFY_SOCKET"))
        self.signals = [signal.SIGTERM, signal.SIGINT]
        if self._reloads or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self.signals.append(signal.SIGHUP)

    async def stop(
        self,
        received: AsyncIterator[signal.Signals],
        reload: Callable[[], Awaitable[object]] | None = None,
    ) -> signal.Signals:
        """Wait for the signal that asks for a stop.

        SIGHUP calls `reload`. A reload that fails is no stop; `reload` logs its own HearthError.
        """
        while True:
            number = await anext(received)
            if number is not signal.SIGHUP or not self._reloads:
                return number
            if reload is not None:
                await _survived(reload)

    def nothing_to_reload(self) -> None:
        """Ignore SIGHUP until a reload is possible, if SIGHUP asks for one."""
        if self._reloads:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def ignore(self) -> None:
        """Ignore all signals to stop or reload from here on."""
        for number in self.signals:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def held_signals() -> Iterator[Callable[[], None]]:
    """Hold signals to stop until a handler is there; yields a function that sends them again.

    The handlers of Python raise, and an import or a destructor may clear their exception: the
    request to stop would be lost with it.
    """
    came: list[int] = []

    def hold(number: int, _frame: object) -> None:
        came.append(number)

    def send_again() -> None:
        while came:
            signal.raise_signal(came.pop(0))

    before = {number: signal.signal(number, hold) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield send_again
    finally:
        # A handler that was installed meanwhile stays.
        for number, handler in before.items():
            if signal.getsignal(number) is hold:
                signal.signal(number, handler)
        send_again()


async def _survived(reload: Callable[[], Awaitable[object]]) -> None:
    try:
        await reload()
    except HearthError:
        return
    except Exception:  # noqa: BLE001 - the settings that run are as good as before
        _log.exception("a reload failed")


async def force_stop(stop: Awaitable[signal.Signals], patience: anyio.CancelScope) -> None:
    """Cancel the scope `patience` at the next signal to stop."""
    await stop
    patience.cancel()
