from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio
import structlog

from actors.addresses import (
    CONTROL_LIMIT,
    DOOR,
    SCHEDULER,
    SCHEDULER_CONTROL,
    TOKENIZER,
    WORK_LIMIT,
)
from actors.admission import PolicySettings
from actors.mailbox import MailboxFull, Receiver, Sender, ZmqContext
from actors.messages import (
    Accepted,
    AskReport,
    Cancel,
    DoorMessage,
    ExecutorControl,
    ExecutorGone,
    ExecutorLost,
    ExecutorMessage,
    ExecutorReady,
    Offer,
    RowsCut,
    RowsEnded,
    RowsFailed,
    RowsPlaced,
    RowsReturned,
    SchedulerControl,
    SchedulerMessage,
    SchedulerReport,
    Submit,
    TokenizerMessage,
)
from actors.scheduler_policy import Decision, SchedulerPolicy
from runtime.errors import HearthError

SEND_TIMEOUT_S = 10.0
"""How long the tokenizer or front door may be behind before the scheduler gives up."""
_log = structlog.get_logger("scheduler")

Connect = Callable[[str], Sender[Any]]
"""Opens a sending end to an executor's endpoint."""


class SchedulerActor:
    """The loop around the policy: inboxes and clock in, decisions to the other actors.

    It owns the mailboxes that it is given and the ends to the executor, which it opens with
    `connect` whenever an executor is ready.
    """

    def __init__(
        self,
        *,
        inbox: Receiver[SchedulerMessage],
        control: Receiver[SchedulerControl],
        to_tokenizer: Sender[TokenizerMessage],
        to_door: Sender[DoorMessage],
        connect: Connect,
        policy: SchedulerPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._control = control
        self._to_tokenizer = to_tokenizer
        self._to_door = to_door
        self._connect = connect
        self._policy = policy
        self._clock = clock
        self._work: Sender[ExecutorMessage] | None = None
        self._executor_control: Sender[ExecutorControl] | None = None
        self._decisions: list[Decision] = []
        self._wake = anyio.Event()

    async def run(self) -> None:
        """Work until cancelled; raises MailboxFull when another actor is far behind."""
        with self._inbox, self._control, self._to_tokenizer, self._to_door:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._listen, self._inbox)
                    tasks.start_soon(self._listen, self._control)
                    tasks.start_soon(self._act)
            finally:
                self._disconnect()

    def adopt(self, settings: PolicySettings) -> None:
        """Decide by other settings from now on; see the policy. It is called on its event loop."""
        self._policy.adopt(settings)
        self._wake.set()

    async def _listen(self, inbox: Receiver[Any]) -> None:
        while True:
            # While there is mail this does not wait, so a burst of requests is decided together.
            self._handle(await inbox.receive())
            self._wake.set()

    async def _act(self) -> None:
        while True:
            # Set by any mail from here on, also while a send below waits.
            self._wake = anyio.Event()
            decisions = self._decisions + self._policy.tick(self._clock())
            self._decisions = []
            for decision in decisions:
                await self._carry_out(decision)
            due = self._policy.next_wake()
            with anyio.move_on_after(None if due is None else due - self._clock()):
                await self._wake.wait()

    def _handle(self, message: SchedulerMessage | SchedulerControl) -> None:
        now = self._clock()
        match message:
            case Submit():
                self._decisions += self._policy.submit(message, now)
            case Cancel(rid):
                self._decisions += self._policy.cancel(rid)
            case RowsPlaced():
                self._policy.rows_placed(message, now)
            case RowsEnded():
                self._policy.rows_ended(message, now)
            case RowsFailed():
                self._decisions += self._policy.rows_failed(message, now)
            case RowsReturned():
                self._decisions += self._policy.rows_returned(message, now)
            case AskReport(rid):
                self._decisions.append(self._policy.report(rid))
            case ExecutorReady():
                self._decisions += self._take_over(message, now)
            case ExecutorLost(reason):
                self._disconnect()
                self._decisions += self._policy.executor_lost(reason, now)

    def _take_over(self, message: ExecutorReady, now: float) -> list[Decision]:
        self._disconnect()
        try:
            self._work = self._connect(message.work)
            self._executor_control = self._connect(message.control)
        except HearthError as error:
            # Requests wait for the next one; what the one before had is lost.
            _log.error("the executor cannot be reached", reason=error.message)
            self._disconnect()
            return self._policy.executor_lost(error.message, now)
        return self._policy.executor_ready(message, now)

    async def _carry_out(self, decision: Decision) -> None:
        match decision:
            case RowsFailed() | RowsCut() | ExecutorGone():
                await self._to_tokenizer.send(decision, SEND_TIMEOUT_S)
            case Offer():
                _tell_executor(self._work, decision)
            case Accepted() | SchedulerReport():
                await self._to_door.send(decision, SEND_TIMEOUT_S)
            case _:
                _tell_executor(self._executor_control, decision)

    def _disconnect(self) -> None:
        for mailbox in (self._work, self._executor_control):
            if mailbox is not None:
                mailbox.close()
        self._work = self._executor_control = None


def open_scheduler(context: ZmqContext, settings: PolicySettings) -> SchedulerActor:
    """A scheduler with its mailboxes open, in the daemon's process."""

    def connect(endpoint: str) -> Sender[Any]:
        return Sender(context, endpoint, CONTROL_LIMIT)

    return SchedulerActor(
        inbox=Receiver(context, [SCHEDULER], SchedulerMessage, WORK_LIMIT),
        control=Receiver(context, [SCHEDULER_CONTROL], SchedulerControl, CONTROL_LIMIT),
        to_tokenizer=Sender(context, TOKENIZER, WORK_LIMIT),
        to_door=Sender(context, DOOR, WORK_LIMIT),
        connect=connect,
        policy=SchedulerPolicy(settings),
    )


def _tell_executor(mailbox: Sender[Any] | None, message: Decision) -> None:
    # Without an executor, or with one that hangs, the supervisor acts: its rows fail then.
    if mailbox is None:
        return
    try:
        mailbox.post(message)
    except MailboxFull:
        _log.warning("the executor takes no mail", dropped=type(message).__name__)
