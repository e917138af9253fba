"""Room for the open files of all clients: ZeroMQ ends its process when a connection finds none."""

import resource

from runtime.errors import HearthError

_OWN_FILES = 128
"""About what the daemon has open without any client, with room for restarts of its actors."""


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
