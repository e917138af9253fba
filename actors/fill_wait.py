from __future__ import annotations

from hearth.actors.settings import PolicySettings, Reloadable

_MEMORY = 32
"""Windows and batches over which the means are taken, exponentially."""


class FillWait:
    """Whether an idle executor should wait for more rows; no clock, no I/O.

    A window opens when a request could start, and lasts `fill_wait_s`. Waiting costs the first
    request that time. Not waiting costs those that come within the window a whole batch, of which
    they are not part, but `hold_s` at most. So waiting pays while the share of windows in which
    others come, times the mean length of a batch, is more than `fill_wait_s`. Until experience says
    otherwise others come in every window, and a batch takes `hold_s`. A batch is the time from one
    idle moment to the next; rows that join lose less of it, a step and a prefill of their own.
    """

    def __init__(self, settings: Reloadable[PolicySettings]) -> None:
        self._settings = settings
        self._share = 1.0
        self._batch_s = settings.current.hold_s
        self._closes: float | None = None

    @property
    def wait_s(self) -> float:
        """How long to wait for more rows."""
        wait_s = self._settings.current.fill_wait_s
        return wait_s if self._share * self._batch_s > wait_s else 0.0

    def started(self, opened: float, rows: int) -> None:
        """A batch began with `rows` rows out of the window that opened at `opened`."""
        self._settle()
        self._closes = opened + self._settings.current.fill_wait_s
        if rows > 1:
            self._note(others_came=True)

    def arrived(self, now: float) -> None:
        """A request came."""
        if self._closes is not None and now <= self._closes:
            self._note(others_came=True)

    def ended(self, seconds: float) -> None:
        """A batch ended after `seconds`."""
        self._batch_s += (min(seconds, self._settings.current.hold_s) - self._batch_s) / _MEMORY

    def _settle(self) -> None:
        # Nobody came in the window that is open, if one is.
        if self._closes is not None:
            self._note(others_came=False)

    def _note(self, *, others_came: bool) -> None:
        self._share += (others_came - self._share) / _MEMORY
        self._closes = None
