from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio
import structlog

from hearth.actors.addresses import (
    CONTROL_LIMIT,
    DOOR,
    SCHEDULER,
    SCHEDULER_CONTROL,
    TOKENIZER,
    WORK_LIMIT,
)
from hearth.actors.mailbox import MailboxFull, Receiver, Sender, ZmqContext
from hearth.actors.messages import (
    Accepted,
    AdapterGone,
    AskReport,
    Cancel,
    ClientGone,
    DoorMessage,
    DropWork,
    Embedded,
    Encode,
    EncoderLost,
    EncoderMessage,
    EncoderReady,
    ExecutorLost,
    ExecutorMessage,
    ExecutorReady,
    Failed,
    Request,
    RowsCut,
    SchedulerControl,
    SchedulerMessage,
    SchedulerReport,
    StepOutput,
    TokenizerMessage,
)
from hearth.actors.scheduler import encoder_scheduler
from hearth.actors.scheduler.policy import Decision, SchedulerPolicy
from hearth.actors.settings import PolicySettings
from hearth.runtime.errors import HearthError

SEND_TIMEOUT_S = 10.0
"""Seconds for which a send to tokenizer or front door may wait before the scheduler gives up."""
_log = structlog.get_logger("scheduler")

Connect = Callable[[str], Sender[Any]]
"""Factory of a sender to the endpoint of an executor or encoder."""


class SchedulerActor:
    """The loop around the policy: messages and clock in, decisions to the other actors.

    The actor owns its mailboxes, and the senders to executor and encoder, which it opens with
    `connect` when a new executor or encoder is ready.
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
        self._executor: Sender[ExecutorMessage] | None = None
        self._encoder: Sender[EncoderMessage] | None = None
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
                self._disconnect_encoder()

    def adopt(self, settings: PolicySettings) -> None:
        """Use other settings from now on, as the policy does. To be called on its event loop."""
        self._policy.adopt(settings)
        self._wake.set()

    def retire_executor(self) -> None:
        """Schedule no rows for the executor that is asked to end, whose word may come later.

        To be called on its event loop.
        """
        self._policy.executor_retires()

    async def _listen(self, inbox: Receiver[Any]) -> None:
        while True:
            # While there are messages this does not wait: a burst of requests is decided together.
            self._handle(await inbox.receive())
            self._wake.set()

    async def _act(self) -> None:
        while True:
            # Set by any message from here on, also while a send below waits.
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
            case Request():
                self._decisions += self._policy.submit(message, now)
            case Cancel(rid):
                self._policy.cancel(rid)
            case StepOutput():
                self._decisions += self._policy.update(message, now)
            case AdapterGone(name):
                self._decisions += self._policy.adapter_gone(name)
            case AskReport(rid):
                self._decisions.append(self._policy.report(rid))
            case ClientGone(client):
                self._policy.client_gone(client)
            case ExecutorReady():
                self._decisions += self._take_over(message, now)
            case ExecutorLost(reason, blameless):
                self._disconnect()
                lost = self._policy.executor_lost(reason, now, blameless=blameless)
                self._decisions += lost
            case _:
                self._decisions += self._policy.update_images(self._heard(message), now)

    def _take_over(self, message: ExecutorReady, now: float) -> list[Decision]:
        self._disconnect()
        try:
            self._executor = self._connect(message.work)
        except HearthError as error:
            # Requests wait for the next one; what the one before had is lost.
            _log.error("the executor cannot be reached", reason=error.message)
            return self._policy.executor_lost(error.message, now)
        return self._policy.executor_ready(message, now)

    def _heard(self, message: encoder_scheduler.ImageEvent) -> encoder_scheduler.ImageEvent:
        """Connect a new encoder, or disconnect a lost one; returns the message for the policy."""
        if isinstance(message, EncoderReady | EncoderLost):
            self._disconnect_encoder()
        if isinstance(message, EncoderReady):
            try:
                self._encoder = self._connect(message.work)
            except HearthError as error:
                # Its requests wait for the next one.
                _log.error("the encoder cannot be reached", reason=error.message)
                return EncoderLost(error.message)
        return message

    async def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Failed() | RowsCut():
                await self._to_tokenizer.send(decision, SEND_TIMEOUT_S)
            case Accepted() | Embedded() | SchedulerReport():
                await self._to_door.send(decision, SEND_TIMEOUT_S)
            case Encode() | DropWork():
                _tell(self._encoder, decision)
            case _:
                _tell(self._executor, decision)

    def _disconnect(self) -> None:
        if self._executor is not None:
            self._executor.close()
        self._executor = None

    def _disconnect_encoder(self) -> None:
        if self._encoder is not None:
            self._encoder.close()
        self._encoder = None


def open_scheduler(
    context: ZmqContext,
    settings: PolicySettings,
    arenas: encoder_scheduler.ImageArenas | None = None,
    socket: str = "",
) -> SchedulerActor:
    """Open a scheduler and its mailboxes, in the daemon's process.

    For a vision model it allocates the slots of `arenas`, and the encoder reaches it at `socket`.
    """
    endpoints = [SCHEDULER] if arenas is None else [SCHEDULER, socket]

    def connect(endpoint: str) -> Sender[Any]:
        return Sender(context, endpoint, CONTROL_LIMIT)

    return SchedulerActor(
        inbox=Receiver(context, endpoints, SchedulerMessage, WORK_LIMIT),
        control=Receiver(context, [SCHEDULER_CONTROL], SchedulerControl, CONTROL_LIMIT),
        to_tokenizer=Sender(context, TOKENIZER, WORK_LIMIT),
        to_door=Sender(context, DOOR, WORK_LIMIT),
        connect=connect,
        policy=SchedulerPolicy(settings, arenas),
    )


def _tell(mailbox: Sender[Any] | None, message: Decision) -> None:
    # If the receiver is gone, or hangs, its supervisor acts, and the work that it had fails then.
    # An executor that goes on gets the whole state with the next schedule.
    if mailbox is None:
        return
    try:
        mailbox.post(message)
    except MailboxFull:
        _log.warning("an actor takes no mail", dropped=type(message).__name__)
