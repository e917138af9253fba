from typing import Protocol


class Stream(Protocol):
    """An ordered queue of device work."""

    def synchronize(self) -> None:
        """Return when everything that was queued has ended."""


class HostStream:
    """The CPU's stream: work runs on the calling thread, so nothing is ever pending."""

    def synchronize(self) -> None:
        """Return at once: work has ended when the call that started it returns."""
