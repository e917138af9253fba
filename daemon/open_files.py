"""Room for the open files of all clients: ZeroMQ ends its process when a connection finds none.

And the first three, which are no place for others.
"""

import os
import resource
import sys

from runtime.errors import HearthError

_OWN_FILES = 128
"""About what the daemon has open without any client, with room for restarts of its actors."""

_STANDARD_ERROR = 2


def fill_standard_files() -> None:
    """Open nothing in place of standard input, output and error where the caller closed them.

    What is opened next would else take their numbers: a log would go into a socket, and uvloop
    aborts the process when it closes one of them.
    """
    # A file gets the lowest number that is free.
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stderr is None:
        sys.stderr = os.fdopen(_STANDARD_ERROR, "w", closefd=False)


def make_room(clients: int) -> None:
    """Raise this process's limit of open files to the most that the system allows it.

    All connections count, also those that have not said hello, so it is never too high. Raises
    `invalid_value` when not even `clients` connections fit below it.
    """
    limit = _raised_limit()
    if limit != resource.RLIM_INFINITY and limit < clients + _OWN_FILES:
        raise HearthError(
            "invalid_value",
            f"{clients} clients need {clients + _OWN_FILES} open files and the system allows "
            f"{limit}: raise its limit (LimitNOFILE, ulimit -Hn) or serve fewer",
            "clients",
        )


def _raised_limit() -> int:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (ValueError, OSError):
        # The kernel has a bound of its own, which may since have come to lie below `most`.
        return now
    return most
