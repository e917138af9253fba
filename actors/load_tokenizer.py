from __future__ import annotations

from pathlib import Path

from actors.addresses import CONTROL_LIMIT, WORK_LIMIT
from actors.loaded import Loaded, run_in_event_loop
from actors.mailbox import Receiver, Sender, ZmqContext
from actors.messages import SupervisorMessage, TokenizerMessage
from actors.roles import TokenizerRole
from actors.tokenizer import TokenizerActor
from runtime.text import Tokenizer


def make_tokenizer(role: TokenizerRole, context: ZmqContext) -> TokenizerActor:
    """A tokenizer with its mailboxes open, for any event loop; raises HearthError."""
    tokenizer = Tokenizer.open(Path(role.engine))
    return TokenizerActor(
        inbox=Receiver(context, role.inbox, TokenizerMessage, WORK_LIMIT),
        to_scheduler=Sender(context, role.addresses.scheduler, WORK_LIMIT),
        to_scheduler_control=Sender(context, role.addresses.scheduler_control, CONTROL_LIMIT),
        to_door=Sender(context, role.addresses.door, WORK_LIMIT),
        tokenizer=tokenizer,
    )


def load_tokenizer(
    role: TokenizerRole, name: str, context: ZmqContext, to_supervisor: Sender[SupervisorMessage]
) -> Loaded:
    """A tokenizer with an event loop of its own; raises HearthError."""
    actor = make_tokenizer(role, context)
    return Loaded(lambda: run_in_event_loop(name, actor.run, to_supervisor))
