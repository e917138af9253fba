"""A started actor, in a process or a thread: wait for its end, or bring it about."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Protocol

import anyio
import anyio.abc
import msgspec
import structlog

import actors
from actors.host import run_actor
from actors.logs import Format, Level
from actors.mailbox import ZmqContext
from actors.roles import AnyRole, HostConfig
from runtime.errors import HearthError

_log = structlog.get_logger("hearth.supervisor")
# Modules are looked for where a process starts: there must be the same code as here, and not
# whatever lies in the folder where the daemon was started.
_SOURCE = Path(actors.__file__).resolve().parents[1]
_THREAD_POLL_S = 0.05


class ActorHandle(Protocol):
    """What the supervisor can do with an actor that it has started."""

    can_be_killed: bool

    async def wait(self) -> str:
        """Wait for the end; how it came, as the end of a sentence about the actor."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...

    def kill(self) -> None:
        """End it by force."""
        ...


class ProcessHandle:
    """An actor in a process of its own, started with an argument vector."""

    can_be_killed = True

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """The process number."""
        return self._process.pid

    @classmethod
    async def start(
        cls, name: str, role: AnyRole, log_level: Level, log_format: Format
    ) -> "ProcessHandle":
        """Start `python -m actors.host`; its output goes where the daemon's goes."""
        config = HostConfig(
            name=name,
            role=role,
            parent=os.getpid(),
            folder=str(Path.cwd()),
            log_level=log_level,
            log_format=log_format,
        )
        argument = msgspec.json.encode(config).decode()
        process = await anyio.open_process(
            [sys.executable, "-m", "actors.host", argument],
            stdin=subprocess.DEVNULL,
            stdout=None,
            stderr=None,
            cwd=_SOURCE,
        )
        return cls(process)

    async def wait(self) -> str:
        """Wait for the end and reap the process."""
        status = await self._process.wait()
        if status < 0:
            return f"it was ended by {signal.Signals(-status).name}"
        return f"it ended with status {status}"

    def terminate(self) -> None:
        """Send SIGTERM, if the process still runs."""
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL, if the process still runs."""
        if self._process.returncode is None:
            self._process.kill()


class ThreadHandle:
    """An actor in a thread of the daemon's process; it ends by a message alone."""

    can_be_killed = False

    def __init__(self, name: str, role: AnyRole, context: ZmqContext) -> None:
        self._how = "it ended by itself"
        # A thread that hangs must not keep the daemon from ending.
        self._thread = threading.Thread(
            target=self._run, args=(name, role, context), name=name, daemon=True
        )
        self._thread.start()

    async def wait(self) -> str:
        """Wait for the end of the thread."""
        while self._thread.is_alive():  # noqa: ASYNC110 - a thread sets no event of this loop
            await anyio.sleep(_THREAD_POLL_S)
        return self._how

    def terminate(self) -> None:
        """Nothing: a thread ends by the message it was sent before."""

    def kill(self) -> None:
        """Nothing: a thread cannot be ended by force."""

    def _run(self, name: str, role: AnyRole, context: ZmqContext) -> None:
        try:
            run_actor(name, role, context, own_process=False)
        except HearthError as error:
            self._how = error.message
        except Exception:  # noqa: BLE001 - logged; the supervisor decides what follows
            _log.exception("actor failed", actor=name)
            self._how = "its thread failed"
