"""An executor in a thread, and the mailboxes around it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import zmq

from hearth.actors.executor.actor import ExecutorActor, ExecutorTower
from hearth.actors.executor.vision_encoder_memory import VisionEncoderMemory
from hearth.actors.mailbox import MailboxFull, Receiver, Sender
from hearth.actors.messages import (
    Encoded,
    EncodeFailed,
    ExecutorControl,
    ExecutorMessage,
    Failed,
    Schedule,
    Shutdown,
    StepOutput,
    TokenizerMessage,
)
from hearth.actors.supervisor_messages import AdapterAnswer, SupervisorMessage
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import BatchRuntime
from hearth.runtime.request import RowRequest
from tests.actors.mailboxes import next_mail

INCARNATION = 4


@dataclass
class Harness:
    """The neighbours of one executor, which runs in a thread."""

    work: Sender[ExecutorMessage]
    control: Sender[ExecutorControl]
    tokenizer: Receiver[TokenizerMessage]
    supervisor: Receiver[SupervisorMessage]
    actor: ExecutorActor
    failures: list[Exception] = field(default_factory=list)
    heard: list[StepOutput] = field(default_factory=list)
    thread: threading.Thread | None = None
    seq: int = 0
    wanted: list[tuple[float, int]] = field(default_factory=list)
    marked: dict[str, list[int]] = field(default_factory=dict)

    def start(self) -> None:
        def run() -> None:
            try:
                self.actor.run()
            except HearthError as error:
                self.failures.append(error)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def offer(self, *rows: tuple[int, RowRequest], order: float = 0.0) -> None:
        """Want these rows beside those that are wanted already."""
        self.wanted += [(order, rid) for rid, _ in rows]
        self.wanted.sort(key=lambda one: one[0])
        self.schedule(dict(rows))

    def withdraw(self, *rids: int) -> None:
        """Want these rows no longer."""
        self.wanted = [one for one in self.wanted if one[1] not in rids]
        self.schedule()

    def mark(self, how: str, *rids: int) -> None:
        """Have these rows preempted, urgent or cancelled from now on."""
        self.marked.setdefault(how, []).extend(rids)
        self.schedule()

    def schedule(self, new: dict[int, RowRequest] | None = None, heard: int = 0) -> None:
        """Post all that is wanted now."""
        self.seq += 1
        rows = [rid for _, rid in self.wanted]
        self.work.post(Schedule(INCARNATION, self.seq, heard, rows, new or {}, **self.marked))

    def tokens(self) -> dict[int, list[int]]:
        """All tokens by request until nothing has come for a while, in order."""
        while self.hear(0.3) is not None:
            pass
        found: dict[int, list[int]] = {}
        for step in self.steps:
            for token in step.tokens:
                found.setdefault(token.row, []).append(token.token_id)
        return found

    def hear(self, timeout_s: float) -> StepOutput | None:
        """The next message to the tokenizer; all are kept too."""
        message = next_mail(self.tokenizer, timeout_s)
        if message is None:
            return None
        assert isinstance(message, StepOutput)
        assert (message.incarnation, message.number) == (INCARNATION, len(self.heard) + 1)
        self.heard.append(message)
        return message

    @property
    def steps(self) -> list[StepOutput]:
        """Outputs of steps, as far as heard."""
        return [one for one in self.heard if one.tokens]

    @property
    def placed(self) -> list[list[int]]:
        """Requests that got places together, as far as heard."""
        return [one.placed for one in self.heard if one.placed]

    @property
    def preempted(self) -> list[tuple[int, list[int]]]:
        """Rows that came back, with their tokens."""
        return [row for one in self.heard for row in one.preempted.items()]

    @property
    def failed(self) -> list[Failed]:
        """Failures of rows."""
        return [failure for one in self.heard for failure in one.failed]

    @property
    def images(self) -> list[Encoded | EncodeFailed]:
        """Images that are done, or have failed."""
        return [image for one in self.heard for image in one.images]

    def hear_until(self, what: str, count: int = 1) -> Any:
        """Hear until so many of `steps`, `failed` and so on are known; the latest of these."""
        while len(getattr(self, what)) < count:
            assert self.hear(5) is not None, f"there are no {what}"
        return getattr(self, what)[count - 1]

    def hear_of(self, seq: int) -> StepOutput:
        """Hear until the executor has seen this schedule."""
        while not self.heard or self.heard[-1].seq < seq:
            assert self.hear(5) is not None, f"schedule {seq} was not seen"
        return self.heard[-1]

    def adapter_answer(self) -> AdapterAnswer:
        """The next word to the supervisor of an adapter."""
        while not isinstance(message := next_mail(self.supervisor, 5), AdapterAnswer):
            assert message is not None, "no answer was given"
        return message

    def finish(self, *rids: int) -> None:
        """Hear until these rows have ended."""
        left = set(rids)
        while left:
            output = self.hear(5)
            assert output is not None, f"{left} have not ended"
            failed = [rid for failure in output.failed for rid in failure.rids]
            left -= {*output.finished, *output.preempted, *failed}

    def join(self) -> None:
        assert self.thread
        self.thread.join(5)
        assert not self.thread.is_alive()


def rids_of(step: StepOutput) -> list[int]:
    """The requests of the tokens of a step, in their order."""
    return [token.row for token in step.tokens]


@contextmanager
def open_harness(
    runtime: BatchRuntime,
    tower: VisionEncoderMemory | None = None,
    ask: Callable[[], None] | None = None,
) -> Iterator[Harness]:
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
        tower=ExecutorTower(tower),
        ask=ask,
    )
    made = Harness(
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
