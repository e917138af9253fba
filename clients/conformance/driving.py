"""A client's driver, as the suite runs it: commands in, events out, one JSON object a line."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Self

Event: TypeAlias = dict[str, Any]
TERMINAL = {"done", "failed", "tokens", "text", "status_report"}
_CHUNK = 1 << 16


class Client:
    """The folder of a client: its programs, once `check` has built them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def run(self, program: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `check` or `example` to its end."""
        return subprocess.run(
            [str(self.folder / program)],
            cwd=self.folder,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


class Answered:
    """All events of one request, the terminal one last."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = list(events)
        self.end = self.events[-1]
        self.deltas = [one for one in events if one["event"] == "delta"]

    def joined(self, field: str = "text", choice: int = 0) -> str:
        """Text of all deltas of a reply."""
        return "".join(one.get(field) or "" for one in self._of(choice))

    def tokens(self, choice: int = 0) -> list[int]:
        """Token ids of all deltas of a reply."""
        return [token for one in self._of(choice) for token in one.get("tokens") or ()]

    def logprobs(self) -> list[dict[str, Any]]:
        """Log probabilities of all tokens."""
        return [one for delta in self.deltas for one in delta.get("logprobs") or ()]

    def tool_calls(self) -> list[dict[str, Any]]:
        """Whole calls: `id`, `name`, and `arguments` as the map that their text is."""
        found: dict[int, dict[str, Any]] = {}
        for piece in (one for delta in self.deltas for one in delta.get("tool_calls") or ()):
            call = found.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
            for name in call:
                call[name] += piece.get(name) or ""
        return [{**one, "arguments": json.loads(one["arguments"])} for one in found.values()]

    def _of(self, choice: int) -> list[Event]:
        return [one for one in self.deltas if (one.get("choice") or 0) == choice]


class Driver:
    """A running driver of `client`, connected to nothing yet."""

    patience_s = 20.0
    """Longer than any answer takes on a busy machine."""

    def __init__(self, client: Client, address: str) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HEARTH_")}
        self._process = subprocess.Popen(
            [str(client.folder / "driver"), address],
            cwd=client.folder,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self._bytes = bytearray()
        self._unread: list[Event] = []

    @property
    def _out(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def do(self, command: str, name: str | None = None, /, **fields: Any) -> None:
        """Send a command, about the request `name`."""
        about = {} if name is None else {"as": name}
        line = json.dumps({"do": command, **about, **fields}) + "\n"
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()

    def connect(self, **options: Any) -> Event:
        """Open a session; returns its welcome."""
        self.do("connect", **options)
        welcome: Event = self.expect("connected")["welcome"]
        return welcome

    def generate(self, name: str, /, *, read: bool = True, **request: Any) -> None:
        """Start a generation."""
        unread = {} if read else {"read": False}
        self.do("generate", name, request=request, **unread)

    def ask(self, name: str, /, **request: Any) -> Answered:
        """Start a generation and read it to its end."""
        self.generate(name, **request)
        return self.answered(name)

    def expect(self, event: str, name: str | None = None) -> Event:
        """The next event of this kind about the request `name`; others stay for later.

        Fails where the request ends otherwise.
        """
        seen = 0
        deadline = time.monotonic() + self.patience_s
        while True:
            for index, one in enumerate(self._unread[seen:], seen):
                if one.get("as") != name:
                    continue
                if one["event"] == event:
                    return self._unread.pop(index)
                ends = one["event"] in TERMINAL
                assert not ends, f"{name or 'the session'} ended instead of {event}: {one}"
            seen = len(self._unread)
            self._read(deadline, f"{event} of {name or 'the session'}")

    def answered(self, name: str) -> Answered:
        """All events of the request `name` from here to its end."""
        deadline = time.monotonic() + self.patience_s
        while True:
            own = [one for one in self._unread if one.get("as") == name]
            if own and own[-1]["event"] in TERMINAL:
                self._unread = [one for one in self._unread if one.get("as") != name]
                return Answered(own)
            self._read(deadline, f"the end of {name}")

    def unread(self, name: str) -> list[Event]:
        """Events of a request that have come and that nobody has taken."""
        return [one for one in self._unread if one.get("as") == name]

    def close(self) -> list[Event]:
        """Close the client; returns what it reported until then, `closed` being last."""
        self.do("close")
        return self._ended()

    def end_input(self) -> list[Event]:
        """End the input, which closes the client; returns as `close` does."""
        return self._ended()

    def _ended(self) -> list[Event]:
        assert self._process.stdin is not None
        self._process.stdin.close()
        deadline = time.monotonic() + self.patience_s
        while not any(one["event"] == "closed" for one in self._unread):
            self._read(deadline, "closed")
        code = self._process.wait(self.patience_s)
        assert code == 0, f"the driver ended with {code}"
        self._unread, told = [], self._unread
        assert told[-1]["event"] == "closed"
        return told

    def _read(self, deadline: float, awaited: str) -> None:
        """Wait for one more event at least."""
        while (end := self._bytes.rfind(b"\n")) < 0:
            left = deadline - time.monotonic()
            ready = self._selector.select(left) if left > 0 else []
            assert ready, f"no {awaited} in time; unread: {self._unread}"
            data = os.read(self._out, _CHUNK)
            assert data, f"the driver ended instead of {awaited}; unread: {self._unread}"
            self._bytes += data
        lines, self._bytes = self._bytes[:end], self._bytes[end + 1 :]
        self._unread += [json.loads(line) for line in lines.splitlines() if line]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
