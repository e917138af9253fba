"""A door that can be shut, and a tokenizer that takes its time."""

from __future__ import annotations

import threading
from typing import Any

from hearth.actors.mailbox import MailboxFull, Sender
from hearth.actors.messages import DoorMessage
from hearth.runtime.text.tokenizer import Tokenizer


class Gate:
    """A sending end to the front door that takes nothing while it is shut."""

    def __init__(self, inner: Sender[DoorMessage]) -> None:
        self.inner = inner
        self.shut = False

    async def send(self, message: DoorMessage, timeout_s: float) -> None:
        if self.shut:
            raise MailboxFull("inproc://d")
        await self.inner.send(message, timeout_s)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.inner.close()


class SlowTokenizer:
    """Encodes in its own time: after `go` is set, and only in a worker thread."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.go = threading.Event()
        self.started = threading.Event()
        self.thread: int | None = None

    def encode(self, text: str, field: str, most: int | None = None) -> list[int]:
        self.thread = threading.get_ident()
        self.started.set()
        self.go.wait(5)
        return self.inner.encode(text, field, most)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
