"""What of new settings takes effect in a daemon that runs, and what needs a restart; pure."""

from typing import NamedTuple

from daemon.configuration.settings import SETTINGS, Settings, replaced


class Change(NamedTuple):
    """The settings that are to run, and in the settings' order the names of those that differ.

    Those that need a restart are still as they were in `settings`.
    """

    settings: Settings
    changed: list[str]
    needs_restart: list[str]


def change_to(running: Settings, read: Settings) -> Change:
    """What becomes of the settings that run where others are read."""
    differ = [one for one in SETTINGS.values() if one.of(running) != one.of(read)]
    # Weights are made for an engine: those of the next one wait for it.
    waits = "weights" if running.engine != read.engine else ""
    taken = [one for one in differ if one.declared.reloads and one.name != waits]
    settings = replaced(running, **{one.name: one.of(read) for one in taken})
    changed = [one.name for one in taken]
    return Change(settings, changed, [one.name for one in differ if one.name not in changed])
