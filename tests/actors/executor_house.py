"""An executor in a thread, and the mailboxes around it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq

from hearth.actors.actor_message import FromExecutor
from hearth.actors.executor import ExecutorActor
from hearth.actors.executor_messages import ExecutorControl, ExecutorMessage, Offer, Offered
from hearth.actors.executor_tower import ExecutorTower
from hearth.actors.mailbox import MailboxFull, Receiver, Sender
from hearth.actors.messages import (
    RowsEnded,
    RowsFailed,
    RowsPlaced,
    RowsReturned,
    Shutdown,
    Step,
    TokenizerMessage,
)
from hearth.actors.supervisor_messages import AdapterAnswer, SupervisorMessage
from hearth.actors.tower_memory import TowerMemory
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import BatchRuntime
from hearth.runtime.request import RowRequest
from tests.actors.mail import next_mail

INCARNATION = 4
Told = TypeVar("Told", bound=FromExecutor)


@dataclass
class House:
    """The neighbours of one executor, which runs in a thread."""

    work: Sender[ExecutorMessage]
    control: Sender[ExecutorControl]
    tokenizer: Receiver[TokenizerMessage]
    supervisor: Receiver[SupervisorMessage]
    actor: ExecutorActor
    failures: list[Exception] = field(default_factory=list)
    heard: list[FromExecutor] = field(default_factory=list)
    thread: threading.Thread | None = None

    def start(self) -> None:
        def run() -> None:
            try:
                self.actor.run()
            except HearthError as error:
                self.failures.append(error)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def offer(self, *rows: tuple[int, RowRequest], order: float = 0.0) -> None:
        self.work.post(Offer([Offered(rid, row, order) for rid, row in rows]))

    def tokens(self) -> dict[int, list[int]]:
        """All tokens by request until nothing has come for a while, in order."""
        while self.hear(0.3) is not None:
            pass
        found: dict[int, list[int]] = {}
        for step in self.of(Step):
            for rid, token in zip(step.rids, step.tokens, strict=True):
                found.setdefault(rid, []).append(token.token_id)
        return found

    def hear(self, timeout_s: float) -> FromExecutor | None:
        """The next message to the tokenizer; all are kept too."""
        message = next_mail(self.tokenizer, timeout_s)
        if message is None:
            return None
        assert isinstance(message, FromExecutor)
        assert message.incarnation == INCARNATION
        self.heard.append(message)
        return message

    def of(self, kind: type[Told]) -> list[Told]:
        """What has been heard of one kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    def adapter_answer(self) -> AdapterAnswer:
        """The next word to the supervisor of an adapter."""
        while not isinstance(message := next_mail(self.supervisor, 5), AdapterAnswer):
            assert message is not None, "no answer was given"
        return message

    def hear_until(self, kind: type[Told], count: int = 1) -> Told:
        """Hear until there are so many messages of one kind; the latest of these."""
        while len(self.of(kind)) < count:
            assert self.hear(5) is not None, f"no {kind.__name__} was told"
        return self.of(kind)[count - 1]

    def finish(self, *rids: int) -> None:
        """Hear until these rows have ended."""
        left = set(rids)
        while left:
            message = self.hear(5)
            assert message is not None, f"{left} have not ended"
            match message:
                case Step():
                    pairs = zip(message.rids, message.tokens, strict=True)
                    left -= {rid for rid, token in pairs if token.finish is not None}
                case RowsEnded() | RowsFailed():
                    left -= set(message.rids)
                case RowsReturned():
                    left -= {*message.unplaced, *(one.rid for one in message.released)}

    @property
    def placed(self) -> list[list[int]]:
        """Who got places together, as far as heard."""
        return [message.rids for message in self.of(RowsPlaced)]

    def join(self) -> None:
        assert self.thread
        self.thread.join(5)
        assert not self.thread.is_alive()


@contextmanager
def open_house(
    runtime: BatchRuntime,
    tower: TowerMemory | None = None,
    ask: Callable[[], None] | None = None,
) -> Iterator[House]:
    """An executor of this runtime; it is stopped in the end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def bind(name: str, kind: Any) -> Receiver[Any]:
        return Receiver(context, [f"inproc://{name}"], kind, 1000)

    def connect(name: str) -> Sender[Any]:
        return Sender(context, f"inproc://{name}", 1000)

    to_supervisor = connect("supervisor")
    actor = ExecutorActor(
        name="executor-1",
        incarnation=INCARNATION,
        inbox=bind("work", ExecutorMessage),
        control=bind("control", ExecutorControl),
        to_tokenizer=connect("tokenizer"),
        to_supervisor=to_supervisor,
        runtime=runtime,
        tower=ExecutorTower(INCARNATION, tower),
        ask=ask,
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
