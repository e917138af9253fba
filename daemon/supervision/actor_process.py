"""An actor's process: start it, wait for its end, or bring that about."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.abc
import msgspec

import actors
from actors.roles import HostConfig

# Modules are looked for where a process starts: there must be the same code as here, and not
# whatever lies in the folder where the daemon was started.
_SOURCE = Path(actors.__file__).resolve().parents[1]


ENDED_WELL = "it ended with status 0"
"""How the end came of one that found nothing wrong."""


class ActorProcess:
    """A process of `actors.host`."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """The process number."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its end has not been seen yet."""
        return self._process.returncode is None

    @classmethod
    async def start(cls, config: HostConfig) -> ActorProcess:
        """Start the actor; its output goes where the daemon's goes. Raises OSError."""
        argument = msgspec.json.encode(config).decode()
        process = await anyio.open_process(
            [sys.executable, "-m", "actors.host", argument],
            stdin=subprocess.DEVNULL,
            stdout=None,
            stderr=None,
            cwd=_SOURCE,
            pass_fds=config.descriptors,
        )
        return cls(process)

    async def wait(self) -> str:
        """Wait for the end and reap the process; how it came, as the end of a sentence."""
        status = await self._process.wait()
        if status < 0:
            return f"it was ended by {_signal(-status)}"
        return f"it ended with status {status}" if status else ENDED_WELL

    def kill(self) -> None:
        """Send SIGKILL, if the process still runs."""
        if self.alive:
            self._process.kill()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # Most real-time signals have no name.
        return f"signal {number}"
