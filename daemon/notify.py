"""Word to the service manager: sd_notify(3) in its documented form."""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from daemon.life import Life, words


def tell_state(life: Life) -> None:
    """Show the state where the manager shows the service's."""
    notify(f"STATUS={words(*life)}")


@contextmanager
def reloading() -> Iterator[None]:
    """Tell that the service takes over new settings, and when it has; it must have been ready."""
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
