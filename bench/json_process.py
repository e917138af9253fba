"""A child process that is spoken to in lines of JSON; no wait is without an end."""

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from runtime.errors import HearthError

_CLOSE_TIMEOUT_S = 10.0


class JsonProcess:
    """`python -m module arguments`, its standard error in `log`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._module = module
        self._log = log
        self._buffer = b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own modules
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environ or {})},
                bufsize=0,
            )

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Write one line; raises `internal` when the process is gone."""
        try:
            self._pipe(self._process.stdin).write(msgspec.json.encode(message) + b"\n")
        except BrokenPipeError as error:
            raise self._gone("has ended") from error

    def receive(self, timeout_s: float) -> bytes:
        """The next line; raises `internal` when it does not come in time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not self._readable(deadline - time.monotonic()):
                raise self._gone(f"has said nothing for {timeout_s:g} s")
            chunk = os.read(self._pipe(self._process.stdout).fileno(), 1 << 20)
            if not chunk:
                raise self._gone("has ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def close(self) -> None:
        """Close its input and wait for its end; one that stays is killed."""
        self._pipe(self._process.stdin).close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe(self._process.stdout).close()

    def _readable(self, timeout_s: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe(self._process.stdout), selectors.EVENT_READ)
            return bool(selector.select(max(0.0, timeout_s)))

    def _pipe(self, pipe: Any) -> Any:
        if pipe is None:
            raise RuntimeError("the process was started without pipes")
        return pipe

    def _gone(self, what: str) -> HearthError:
        return HearthError("internal", f"{self._module} {what}: see {self._log}")
