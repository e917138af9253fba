"""A service manager that is played by a test."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread


class Manager:
    """Hears what a service says to its manager, at once and line by line."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self.closed = False
        self._heard: Queue[str] = Queue()
        self._thread = Thread(target=self._listen)
        self._thread.start()

    def until(self, line: str) -> list[str]:
        """All lines that have not been asked for before, up to the first that is `line`."""
        lines: list[str] = []
        while line not in lines:
            lines.append(self._heard.get(timeout=30))
        return lines

    def forget(self) -> None:
        """Leave out what has been heard so far."""
        with suppress(Empty):
            while True:
                self._heard.get_nowait()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"end", self.address)
        self._thread.join()
        self._socket.close()
        self.closed = True

    def _listen(self) -> None:
        line = ""
        while line != "end":
            for line in self._socket.recv(4096).decode().split("\n"):
                self._heard.put(line)
