"""What the executor is told; see `hearth.actors.messages`."""

import msgspec

from hearth.actors.actor_message import ActorMessage
from hearth.actors.encoder_messages import RunTower
from hearth.actors.messages import Cancel, SetLogLevel, Shutdown
from hearth.runtime.request import RowRequest


class Offered(msgspec.Struct, frozen=True, array_like=True):
    """A row that may take a place; of several that wait the lowest `order` goes first."""

    rid: int
    row: RowRequest
    order: float


class Offer(ActorMessage, tag="offer"):
    """Give these rows places as soon as some are free, but for those that are revoked before.

    Each of them is answered once: by its end, its failure or its return.
    """

    rows: list[Offered]


class Revoke(ActorMessage, tag="revoke"):
    """Give these rows back unless they have a place."""

    rids: list[int]


class Release(ActorMessage, tag="release"):
    """Others shall have the places of these rows: give them back, with what they have generated.

    A row first decodes for as long as its prefill took, unless it goes `at_once`.
    """

    rids: list[int]
    at_once: bool = False


class Unpin(ActorMessage, tag="unpin"):
    """Keep no longer what this client's rows have pinned in the prefix cache: it has gone.

    Its rows have ended before, or their cancels were sent before this.
    """

    client: int


class LoadAdapter(ActorMessage, tag="load_adapter"):
    """Rows may ask for this adapter from now on: it lies in `folder`, an absolute path."""

    name: str
    folder: str


class UnloadAdapter(ActorMessage, tag="unload_adapter"):
    """Rows may ask for this adapter no longer; those that have fail with `adapter_unknown`."""

    name: str


class Retire(ActorMessage, tag="retire"):
    """Another executor takes over: end once the rows that have places have ended.

    No row gets a place any more: those that were offered are given back.
    """


ExecutorMessage = Offer | RunTower
ExecutorControl = (
    Cancel
    | Revoke
    | Release
    | LoadAdapter
    | UnloadAdapter
    | Unpin
    | SetLogLevel
    | Retire
    | Shutdown
)
