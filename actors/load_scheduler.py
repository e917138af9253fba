from __future__ import annotations

from typing import Any

from actors.addresses import CONTROL_LIMIT, WORK_LIMIT
from actors.loaded import Loaded, run_in_event_loop
from actors.mailbox import Receiver, Sender, ZmqContext
from actors.messages import SchedulerControl, SchedulerMessage, SupervisorMessage
from actors.roles import SchedulerRole
from actors.scheduler import SchedulerActor
from actors.scheduler_policy import SchedulerPolicy


def make_scheduler(role: SchedulerRole, context: ZmqContext) -> SchedulerActor:
    """A scheduler with its mailboxes open, for any event loop."""

    def connect(endpoint: str) -> Sender[Any]:
        return Sender(context, endpoint, CONTROL_LIMIT)

    return SchedulerActor(
        inbox=Receiver(context, role.inbox, SchedulerMessage, WORK_LIMIT),
        control=Receiver(context, role.control, SchedulerControl, CONTROL_LIMIT),
        to_tokenizer=Sender(context, role.addresses.tokenizer, WORK_LIMIT),
        to_door=Sender(context, role.addresses.door, WORK_LIMIT),
        connect=connect,
        policy=SchedulerPolicy(role.policy),
    )


def load_scheduler(
    role: SchedulerRole, name: str, context: ZmqContext, to_supervisor: Sender[SupervisorMessage]
) -> Loaded:
    """A scheduler with an event loop of its own."""
    actor = make_scheduler(role, context)
    return Loaded(lambda: run_in_event_loop(name, actor.run, to_supervisor))
