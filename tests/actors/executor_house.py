"""An executor in a thread, and the mailboxes around it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import zmq

from actors.executor import ExecutorActor
from actors.mailbox import MailboxFull, Receiver, Sender
from actors.messages import (
    BatchEnded,
    ExecutorControl,
    ExecutorMessage,
    RowsFailed,
    RunBatch,
    Shutdown,
    Step,
    SupervisorMessage,
    TokenizerMessage,
)
from runtime.decoding.batch_runtime import BatchRuntime
from runtime.errors import HearthError
from runtime.request import RowRequest


@dataclass
class House:
    """The neighbours of one executor, which runs in a thread."""

    work: Sender[ExecutorMessage]
    control: Sender[ExecutorControl]
    tokenizer: Receiver[TokenizerMessage]
    supervisor: Receiver[SupervisorMessage]
    actor: ExecutorActor
    failures: list[Exception] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    ended: list[BatchEnded] = field(default_factory=list)
    thread: threading.Thread | None = None

    def start(self) -> None:
        def run() -> None:
            try:
                self.actor.run()
            except HearthError as error:
                self.failures.append(error)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def run(self, number: int, *rows: tuple[int, RowRequest]) -> None:
        self.work.post(RunBatch(number, dict(rows)))

    def tokens(self) -> dict[int, list[int]]:
        """All tokens by request until the batch has ended, in order."""
        while self.hear(0.3) is not None:
            pass
        found: dict[int, list[int]] = {}
        for step in self.steps:
            for rid, token in zip(step.rids, step.tokens, strict=True):
                found.setdefault(rid, []).append(token.token_id)
        self.steps.clear()
        return found

    def hear(self, timeout_s: float) -> TokenizerMessage | None:
        """The next message to the tokenizer; steps and ends of batches are kept too."""
        message = self.tokenizer.wait(timeout_s)
        if isinstance(message, Step):
            self.steps.append(message)
        elif isinstance(message, BatchEnded):
            self.ended.append(message)
        return message

    def failed(self) -> RowsFailed:
        while (message := self.hear(5)) is not None:
            if isinstance(message, RowsFailed):
                return message
        raise AssertionError("no failure was told")

    def batch_ended(self) -> BatchEnded:
        while not self.ended:
            assert self.hear(5) is not None
        return self.ended.pop(0)

    def join(self) -> None:
        assert self.thread
        self.thread.join(5)
        assert not self.thread.is_alive()


@contextmanager
def open_house(runtime: BatchRuntime) -> Iterator[House]:
    """An executor of this runtime; it is stopped in the end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def bind(name: str, kind: Any) -> Receiver[Any]:
        return Receiver(context, [f"inproc://{name}"], kind, 1000)

    def connect(name: str) -> Sender[Any]:
        return Sender(context, f"inproc://{name}", 1000)

    to_supervisor = connect("supervisor")
    actor = ExecutorActor(
        name="executor-1",
        inbox=bind("work", ExecutorMessage),
        control=bind("control", ExecutorControl),
        to_tokenizer=connect("tokenizer"),
        to_supervisor=to_supervisor,
        runtime=runtime,
    )
    made = House(
        work=connect("work"),
        control=connect("control"),
        tokenizer=bind("tokenizer", TokenizerMessage),
        supervisor=bind("supervisor", SupervisorMessage),
        actor=actor,
    )
    yield made
    if made.thread is None:
        made.start()
    with suppress(MailboxFull):  # it may have ended before
        made.control.post(Shutdown())
    made.join()
    for mailbox in (made.work, made.control, made.tokenizer, made.supervisor):
        mailbox.close()
    to_supervisor.close()
    context.term()
