"""The encoder: pictures in shared memory become embeddings there."""

from __future__ import annotations

import os
import time
from collections import deque

import structlog

from actors.addresses import CONTROL_LIMIT, WORK_LIMIT
from actors.encoder_messages import DropWork, Encode, EncodeFailed
from actors.logs import set_level
from actors.mailbox import MailboxFull, Receiver, Sender, wait_any
from actors.messages import EncoderControl, EncoderMessage, SchedulerMessage, SetLogLevel, Shutdown
from actors.roles import EncoderSettings, Host, ReadyActor
from actors.supervisor_messages import ActorProgress, SupervisorMessage

SEND_TIMEOUT_S = 10.0
"""How long the scheduler may be behind before the encoder gives up."""
PROGRESS_S = 1.0
"""Seconds between two signs of progress, while working and while waiting."""
_FLUSH_S = 2.0
_log = structlog.get_logger("encoder")


class EncoderActor:
    """Answers every piece of work once, in order, on one thread.

    It owns the mailboxes that it is given, except `to_supervisor`.
    """

    def __init__(
        self,
        *,
        name: str,
        inbox: Receiver[EncoderMessage],
        control: Receiver[EncoderControl],
        to_scheduler: Sender[SchedulerMessage],
        to_supervisor: Sender[SupervisorMessage],
    ) -> None:
        self._name = name
        self._inbox = inbox
        self._control = control
        self._to_scheduler = to_scheduler
        self._to_supervisor = to_supervisor
        self._waiting: deque[Encode] = deque()
        self._stopping = False
        self._reported = float("-inf")

    def run(self) -> None:
        """Work until told to stop."""
        with self._inbox, self._control, self._to_scheduler:
            while not self._stopping:
                self._report()
                self._read()
                if self._waiting:
                    self._encode(self._waiting.popleft())
                else:
                    wait_any([self._inbox, self._control], PROGRESS_S)

    def _read(self) -> None:
        while (told := self._control.receive_nowait()) is not None:
            match told:
                case SetLogLevel(level):
                    set_level(level)
                case Shutdown():
                    self._stopping = True
        while (message := self._inbox.receive_nowait()) is not None:
            match message:
                case Encode():
                    self._waiting.append(message)
                case DropWork(numbers):
                    self._drop(frozenset(numbers))

    def _drop(self, numbers: frozenset[int]) -> None:
        dropped = [work for work in self._waiting if work.number in numbers]
        self._waiting = deque(work for work in self._waiting if work.number not in numbers)
        for work in dropped:
            self._fail(work, "cancelled", "nobody waits for it any more")

    def _encode(self, work: Encode) -> None:
        self._fail(work, "encoder_failed", "this encoder has no tower")

    def _fail(self, work: Encode, code: str, message: str) -> None:
        self._tell(EncodeFailed(work.number, code, message))

    def _tell(self, message: SchedulerMessage) -> None:
        self._to_scheduler.send_blocking(message, SEND_TIMEOUT_S)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported < PROGRESS_S:
            return
        self._reported = now
        try:
            self._to_supervisor.post(ActorProgress(self._name))
        except MailboxFull:
            # A supervisor that is behind has unread signs of progress enough.
            _log.debug("the supervisor is behind")


def open_encoder(host: Host, settings: EncoderSettings) -> ReadyActor:
    """An encoder with its mailboxes open; raises HearthError."""
    started = time.monotonic()
    os.nice(settings.nice)
    addresses, context = host.addresses, host.context
    actor = EncoderActor(
        name=host.name,
        inbox=Receiver(context, [addresses.work], EncoderMessage, WORK_LIMIT),
        control=Receiver(context, [addresses.control], EncoderControl, CONTROL_LIMIT),
        to_scheduler=Sender(context, addresses.scheduler, WORK_LIMIT, _FLUSH_S),
        to_supervisor=host.to_supervisor,
    )
    return ReadyActor(actor.run, {"load_s": round(time.monotonic() - started, 3)})
