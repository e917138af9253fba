"""What the executor is told; see `hearth.actors.messages`."""

import msgspec

from hearth.actors.actor_message import ActorMessage
from hearth.actors.encoder_messages import RunTower
from hearth.actors.messages import SetLogLevel, Shutdown
from hearth.runtime.request import RowRequest


class Schedule(ActorMessage, tag="schedule"):
    """All that the scheduler wants of one executor's rows; of two the higher `seq` counts.

    `rows` get places in this order as soon as some are free; what they ask is in `new` once, and
    again where the executor misses it. A row that has no place and is not among them is given up.
    Those that have places go on, but for the `cancelled`, which are dropped, and the `preempted`,
    which leave with what they have generated: once they have decoded for as long as their prefill
    took, or at once where they are `urgent`. The scheduler has heard all outputs up to `heard`.
    """

    incarnation: int
    seq: int
    heard: int
    rows: list[int] = msgspec.field(default_factory=list)
    new: dict[int, RowRequest] = msgspec.field(default_factory=dict)
    preempted: list[int] = msgspec.field(default_factory=list)
    urgent: list[int] = msgspec.field(default_factory=list)
    cancelled: list[int] = msgspec.field(default_factory=list)


class Unpin(ActorMessage, tag="unpin"):
    """Keep no longer what this client's rows have pinned in the prefix cache: it has gone.

    Its rows have ended before, or a `Schedule` before this cancels them.
    """

    client: int


class LoadAdapter(ActorMessage, tag="load_adapter"):
    """Rows may ask for this adapter from now on: it lies in `folder`, an absolute path."""

    name: str
    folder: str


class UnloadAdapter(ActorMessage, tag="unload_adapter"):
    """Rows may ask for this adapter no longer; those that have fail with `adapter_unknown`."""

    name: str


ExecutorMessage = Schedule | RunTower | Unpin
ExecutorControl = LoadAdapter | UnloadAdapter | SetLogLevel | Shutdown
