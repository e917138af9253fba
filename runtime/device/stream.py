from typing import Protocol


class Stream(Protocol):
    """An ordered queue of device work."""

    @property
    def handle(self) -> int:
        """The device library's own handle (`CUstream`) as an integer; 0 on the CPU."""

    def synchronize(self) -> None:
        """Return when everything that was queued has ended; raises what it raised."""


class Mark(Protocol):
    """A point in the stream."""

    def query(self) -> bool:
        """Whether all that was queued before it has ended; raises what that raised."""

    def wait(self) -> None:
        """Return when all that was queued before it has ended; raises what that raised."""


class Span(Protocol):
    """What is queued from where it begins to its `end`."""

    def end(self) -> None:
        """Nothing that is queued from now on belongs to it."""

    @property
    def seconds(self) -> float | None:
        """How long the device took for it; None where that has not ended. Raises what it raised."""


class Recorded(Protocol):
    """Work that was captured; whoever has it closes it before what the work uses."""

    def launch(self, stream: Stream, /) -> None:
        """Queue the work as one."""

    def close(self) -> None:
        """Free what the capture holds."""


class HostStream:
    """The CPU's stream: work runs on the calling thread, so nothing is ever pending."""

    handle = 0

    def synchronize(self) -> None:
        """Return at once: work has ended when the call that started it returns."""
