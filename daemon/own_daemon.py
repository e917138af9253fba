"""A daemon that a program starts for itself, in a temporary folder, and stops again."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hearth.daemon.cli.errors import Failure
from hearth_client import Client
from hearth_client.errors import ConnectionFailed

_START_S = 300.0
"""Patience with a slow board: a daemon that ends instead is seen at once."""
_STOP_S = 20.0
_TRY_S = 1.0
_PAUSE_S = 0.05


class OwnDaemon:
    """A running `hearth serve` with `flags`; socket and log are in `folder`.

    `environ` is added to its environment; `log` names another place for the log.
    """

    def __init__(
        self,
        folder: Path,
        engine: Path,
        flags: Sequence[str] = (),
        *,
        environ: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self.socket = folder / "hearth.sock"
        self._log = log or folder / "log"
        arguments = ["serve", "--engine", str(engine), "--socket", str(self.socket), *flags]
        # The settings of the user's own daemon are no concern of this one.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HEARTH_")}
        # What it leaves behind when it is killed goes with the folder.
        places = {"TMPDIR": str(folder), "XDG_STATE_HOME": str(folder)}
        own = {**inherited, **places, **(environ or {})}
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(  # noqa: S603 - our own program and arguments
                [sys.executable, "-m", "hearth.daemon.cli", *arguments], stderr=file, env=own
            )

    @property
    def pid(self) -> int:
        """The daemon's process."""
        return self._process.pid

    @property
    def executor(self) -> int | None:
        """Process id of its executor; None while there is none."""
        return self._actor("executor")

    @property
    def encoder(self) -> int | None:
        """Process id of its encoder; None while there is none."""
        return self._actor("encoder")

    def _actor(self, role: str) -> int | None:
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            with suppress(OSError):
                if f'"role":"{role}"'.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        return None

    @property
    def runs(self) -> bool:
        """True if the end of its process has not been seen yet."""
        return self._process.poll() is None

    def log(self) -> str:
        """Everything that it has logged so far."""
        return self._log.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """Exit code, once it has ended; raises Failure when it runs on."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise Failure("the daemon did not stop in time") from error

    def wait_until_ready(self, seconds: float = _START_S) -> None:
        """Block until a client is welcomed; raises Failure with the log's last line otherwise."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.runs:
            if self._is_ready():
                return
            time.sleep(_PAUSE_S)
        how = f"is not ready after {seconds:.0f} s" if self.runs else "did not start"
        raise Failure(f"the daemon {how}: {self._last_lines()}")

    def stop(self) -> None:
        """End it as a service manager would; raises Failure unless it ends cleanly and in time."""
        self._process.send_signal(signal.SIGTERM)
        code = self.wait(_STOP_S)
        if code:
            raise Failure(f"the daemon ended with exit code {code}: {self._last_lines()}")

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with Client(self.socket, timeout=_TRY_S) as client:
                return client.status().state == "ready"
        except ConnectionFailed:
            return False

    def _last_lines(self) -> str:
        lines = self.log().splitlines()
        return lines[-1] if lines else "it wrote no log"


@contextmanager
def own_daemon(
    engine: Path,
    flags: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[OwnDaemon]:
    """A daemon that serves `engine` and is ready; it is gone at the end, whatever happened."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as folder:
        daemon = OwnDaemon(Path(folder), engine, flags, environ=environ, log=log)
        try:
            daemon.wait_until_ready()
            yield daemon
        finally:
            daemon.kill()
