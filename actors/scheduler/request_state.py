from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from msgspec import structs

from hearth.actors.messages import PromptImage, Request
from hearth.actors.scheduler.embedding_store import StoredEmbedding
from hearth.runtime.images import EmbeddedImage
from hearth.runtime.request import RowRequest

_MOST_SEED = (1 << 63) - 1


class RequestStatus(enum.Enum):
    """Stages of a request at the scheduler; a finished one is removed."""

    WAITING_FOR_IMAGES = enum.auto()
    WAITING = enum.auto()
    OFFERED = enum.auto()
    """Offered to the executor, without a slot yet."""
    WITHDRAWING = enum.auto()
    """Offer taken back, unless it has a slot by then."""
    RUNNING = enum.auto()
    PREEMPTING = enum.auto()
    """Preempted once it has decoded for as long as its prefill took."""
    PREEMPTING_AT_ONCE = enum.auto()
    CANCELLING = enum.auto()
    """Ended for its client, with or without a slot at the executor."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One admitted request at the scheduler, with the tokens generated so far.

    The queue orders it as if it had come at `queued`; `preempted_at` is the time of its last
    preemption, and `gave_way` is set if a light client preempted it before it had paid. When it was
    admitted the images of the keys in `missing` had no embeddings. `pinned` are the embeddings of
    all its images, made or not, and `embedded` the images once all embeddings are made.

    At the executor, `arrival` is its virtual arrival and `order` the key by which it gets a slot. A
    request that is `alone` shares the executor with no other. `placed_at` is the time at which its
    slot was heard of, `first_token_at` the time at which its first token was. After a preemption it
    is queued as if it had come at `behind`, but neither before its arrival nor in the future. `seq`
    is the number of the schedule that carried its status; None if no schedule has yet.
    """

    request: Request
    queued: float
    generated: list[int] = field(default_factory=list)
    accepted: bool = False
    digest: bytes = b""
    preempted_at: float = -math.inf
    gave_way: bool = False
    missing: set[bytes] = field(default_factory=set)
    pinned: list[StoredEmbedding] = field(default_factory=list)
    embedded: list[EmbeddedImage] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    arrival: float = 0.0
    order: float = 0.0
    alone: bool = False
    placed_at: float | None = None
    first_token_at: float | None = None
    behind: float = math.inf
    seq: int | None = None

    @property
    def siblings(self) -> list[RequestState]:
        """The further replies to its prompt, each with a seed of its own, not queued yet."""
        request = self.request
        options, seed = request.options, request.options.seed or 0
        return [
            RequestState(
                structs.replace(
                    request,
                    rid=rid,
                    siblings=[],
                    options=structs.replace(options, seed=(seed + place) & _MOST_SEED),
                ),
                self.queued,
                accepted=True,
            )
            for place, rid in enumerate(request.siblings, 1)
        ]

    @property
    def rid(self) -> int:
        """The request's number."""
        return self.request.rid

    @property
    def priority(self) -> int:
        """The request's priority."""
        return self.request.priority

    @property
    def client(self) -> int:
        """The client's number."""
        return self.request.client

    @property
    def adapter(self) -> str:
        """The name of the adapter that answers, "" for none."""
        return self.request.options.adapter

    @property
    def images(self) -> list[PromptImage]:
        """The images of the prompt."""
        return self.request.images

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt in tokens."""
        return len(self.request.token_ids)

    @property
    def has_slot(self) -> bool:
        """True if it has a slot at the executor, by the outputs so far."""
        return self.placed_at is not None

    @property
    def ends(self) -> bool:
        """True if it only waits for the executor to drop it."""
        return self.status is RequestStatus.CANCELLING

    @property
    def paid(self) -> float:
        """Time at which it has had its slot for twice as long as its prefill took."""
        if self.first_token_at is None or self.placed_at is None:
            return math.inf
        return 2 * self.first_token_at - self.placed_at

    @property
    def deadline(self) -> float | None:
        """The request's deadline."""
        return self.request.deadline

    def is_due(self, now: float) -> bool:
        """True if its deadline has passed."""
        return self.deadline is not None and self.deadline <= now

    def offer(self, arrival: float, order: float, *, alone: bool) -> None:
        """Offer it to the executor by the next schedule: it has no slot yet."""
        self.arrival, self.order, self.alone = arrival, order, alone
        self.placed_at = self.first_token_at = None
        self.behind = math.inf
        self.set_status(RequestStatus.OFFERED)

    def set_status(self, status: RequestStatus) -> None:
        """Set a status, which the next schedule is to carry."""
        self.status, self.seq = status, None

    def to_row(self) -> RowRequest:
        """The row that starts or continues this request."""
        return RowRequest(
            token_ids=self.request.token_ids + self.generated,
            prompt_length=self.prompt_tokens,
            options=self.request.options,
            images=self.embedded,
            client=self.client,
        )
