from typing import Protocol


class Stream(Protocol):
    """An ordered queue of device work."""

    @property
    def handle(self) -> int:
        """The device library's own handle (`CUstream`) as an integer; 0 on the CPU."""

    def synchronize(self) -> None:
        """Return when everything that was queued has ended; raises what it raised."""


class HostStream:
    """The CPU's stream: work runs on the calling thread, so nothing is ever pending."""

    handle = 0

    def synchronize(self) -> None:
        """Return at once: work has ended when the call that started it returns."""
