"""What of new settings takes effect in a daemon that runs, and what needs a restart; pure."""

from typing import NamedTuple

from msgspec import structs

from daemon.configuration.settings import FIELDS, Settings

RELOADABLE = frozenset(
    {
        "adapter_turn_ms",
        "batching",
        "client_memory_mb",
        "client_queue_share",
        "clients",
        "drain_s",
        "fill_wait_ms",
        "hold_s",
        "lease_s",
        "load_timeout_s",
        "log_level",
        "progress_timeout_s",
        "queue_requests",
        "queue_tokens",
        "requests_per_client",
        "restart_limit",
        "weights",
    }
)
"""Settings that a reload takes over; docs/configuration.md marks them."""


class Change(NamedTuple):
    """The settings that are to run, and in the settings' order the names of those that differ.

    Those that need a restart are still as they were in `settings`.
    """

    settings: Settings
    changed: list[str]
    needs_restart: list[str]


def change_to(running: Settings, read: Settings) -> Change:
    """What becomes of the settings that run where others are read."""
    differ = [name for name in FIELDS if getattr(running, name) != getattr(read, name)]
    # Weights are made for an engine: those of the next one wait for it.
    at_once = RELOADABLE - {"weights"} if "engine" in differ else RELOADABLE
    changed = [name for name in differ if name in at_once]
    taken = structs.replace(running, **{name: getattr(read, name) for name in changed})
    return Change(taken, changed, [name for name in differ if name not in at_once])
