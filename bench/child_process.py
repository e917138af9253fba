"""A child process of a bench: both ends of it, in lines of JSON, and what its family holds."""

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hearth.runtime.errors import Code, HearthError

_CLOSE_TIMEOUT_S = 10.0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A child cannot do what it was started for: the parts of a HearthError."""

    code: Code
    message: str
    field: str | None = None


class ChildProcess:
    """`python -m module JOB`, the job as JSON; what its libraries print goes to `log`."""

    def __init__(
        self, module: str, job: Any, log: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self._module = module
        self._log = log
        self._buffer = b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own modules
                [sys.executable, "-m", module, msgspec.json.encode(job).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environ or {})},
                bufsize=0,
            )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pid = self._process.pid

    def send(self, message: Any) -> None:
        """Write one line; raises `internal` when the process is gone."""
        try:
            self._stdin.write(msgspec.json.encode(message) + b"\n")
        except BrokenPipeError as error:
            raise self._gone("has ended") from error

    def receive(self, kind: Any, timeout_s: float) -> Any:
        """The next message, of type `kind`; raises the error with which the child refuses.

        Raises `internal` when nothing comes in time.
        """
        reply = msgspec.json.decode(self._line(timeout_s), type=kind | Refused)
        if isinstance(reply, Refused):
            raise HearthError(reply.code, reply.message, reply.field)
        return reply

    def close(self) -> None:
        """Close its input and wait for its end; one that stays is killed."""
        self._stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    def _line(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._gone(f"has said nothing for {timeout_s:g} s")
                chunk = os.read(self._stdout.fileno(), 1 << 20)
                if not chunk:
                    raise self._gone("has ended")
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _gone(self, what: str) -> HearthError:
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
        return HearthError("internal", f"{self._module} {what}: {last} (see {self._log})")


class ParentProcess:
    """The child's end: its job, the requests to it, and its answers.

    Answers go to what was standard output, which from now on is standard error, so that nothing
    that a library prints ends up between them.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def job(self, kind: Any) -> Any:
        """Job of the process, of type `kind`."""
        return msgspec.json.decode(sys.argv[1], type=kind)

    def send(self, reply: Any) -> None:
        """Write one line."""
        self._file.write(msgspec.json.encode(reply) + b"\n")
        self._file.flush()

    def refuse(self, error: HearthError) -> None:
        """Let the other end's `receive` raise `error`."""
        self.send(Refused(error.code, error.message, error.field))

    def receive(self, kind: Any) -> Any:
        """The next message, of type `kind`; None when there will be no more."""
        line = sys.stdin.buffer.readline()
        return msgspec.json.decode(line, type=kind) if line else None


_PROC = Path("/proc")


class Usage(NamedTuple):
    """Holdings of a family of processes: resident bytes and open file handles."""

    rss_bytes: int
    handles: int


def family_usage(pid: int, proc: Path = _PROC) -> Usage:
    """The sum over `pid` and all its descendants; what has just ended counts nothing."""
    usages = [_usage(proc / str(member)) for member in _family(pid, proc)]
    return Usage(sum(one.rss_bytes for one in usages), sum(one.handles for one in usages))


def _family(pid: int, proc: Path) -> list[int]:
    members = [pid]
    for member in members:
        for children in (proc / str(member) / "task").glob("*/children"):
            members += _children(children)
    return members


def _children(file: Path) -> list[int]:
    # A thread may end between being listed and being read.
    try:
        return [int(child) for child in file.read_text().split()]
    except OSError:
        return []


def _usage(folder: Path) -> Usage:
    try:
        status = (folder / "status").read_text()
        handles = sum(1 for _ in (folder / "fd").iterdir())
    except OSError:
        return Usage(0, 0)
    resident = next((line for line in status.splitlines() if line.startswith("VmRSS:")), "")
    return Usage(1024 * int(resident.split()[1]) if resident else 0, handles)
