"""Processes of a test: a daemon, and nodes."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

PATIENCE_S = 30.0
_START_S = 300.0


class Process:
    """A program that ends with the test; its output is in a file."""

    def __init__(self, command: list[str], log: Path, environ: dict[str, str]) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=environ)

    def __enter__(self) -> "Process":  # noqa: PYI034 - Python 3.10 has no Self
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.terminate()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                raise
        # What only explains a failure is shown with one.
        sys.stderr.write(self.log())

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)

    def log(self) -> str:
        return self._log.read_text(errors="replace")


class Daemon:
    """A Hearth daemon with a shipped model, in an environment of its own."""

    def __init__(self, model: str, folder: Path) -> None:
        self.socket = folder / "hearth.sock"
        root = Path(__file__).parents[4]
        places = [root / "src", root / "clients" / "python", root]
        environ = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
        environ["PYTHONPATH"] = os.pathsep.join(map(str, places))
        self._process = subprocess.Popen(
            [os.environ["HEARTH_PYTHON"], str(Path(__file__).parent / "daemon.py"), model, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        said: list[Any] = []
        reader = Thread(target=lambda: said.append(self._process.stdout.readline()), daemon=True)
        reader.start()
        reader.join(_START_S)
        assert said == ["ready\n"], "the daemon did not start"

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()
