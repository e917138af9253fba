"""Sessions, their leases and the one table of open requests; pure bookkeeping, no I/O."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from hearth.actors.messages import Convert, Deltas, Embedded, Request, RowDelta
from hearth.actors.settings import Reloadable
from hearth.daemon.door.pictures import Filling
from hearth.daemon.door.settings import DoorSettings
from hearth.runtime.errors import HearthError
from hearth.runtime.images import Slot
from hearth.runtime.request import RequestOptions
from hearth_client.protocol import Answer, Delta, Detokenized, Ended, Tokens

# What they take in memory, by which readers that are behind are bounded.
_ANSWER_BYTES = 320
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 140


class Outbox:
    """Answers of one session in order, from the first that could not be sent.

    `blocked_since` is when the session last took an answer, in seconds; meaningful while there
    are any here. `bytes` is about how much the answers here hold, of open requests and of others.
    """

    def __init__(self) -> None:
        self.blocked_since = 0.0
        self.bytes = 0
        # Each with its request, where that may have more text before it is sent.
        self._answers: deque[tuple[Answer, OpenRequest | None]] = deque()

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: Answer, now: float, request: "OpenRequest | None" = None) -> None:
        """Append an answer; a delta is of `request`, and may grow from then on."""
        if not self._answers:
            self.blocked_since = now
        self._answers.append((answer, request))
        self.bytes += _bytes_of(answer)
        if request is not None and isinstance(answer, Delta):
            request.unsent[answer.choice] = answer

    def merge(self, request: "OpenRequest", more: Delta) -> bool:
        """Grow the delta of the same reply that waits here; False when none does."""
        delta = request.unsent.get(more.choice)
        if delta is None:
            return False
        delta.text += more.text
        delta.reasoning += more.reasoning
        delta.tool_calls = [*delta.tool_calls, *more.tool_calls]
        delta.tokens.extend(more.tokens)
        delta.logprobs.extend(more.logprobs)
        delta.ended = more.ended
        self.bytes += _bytes_in(more)
        return True

    def head(self) -> Answer | None:
        """The answer to send next."""
        return self._answers[0][0] if self._answers else None

    def sent(self, now: float) -> None:
        """The head was taken."""
        answer, request = self._answers.popleft()
        self.blocked_since = now
        self.bytes -= _bytes_of(answer)
        if request is not None and isinstance(answer, Delta):
            del request.unsent[answer.choice]

    def withdraw(self, request: "OpenRequest") -> None:
        """Drop the deltas of a request that has failed."""
        for delta in request.unsent.values():
            self._answers = deque(one for one in self._answers if one[0] is not delta)
            self.bytes -= _bytes_of(delta)
        request.unsent.clear()


def _bytes_of(answer: Answer) -> int:
    return _ANSWER_BYTES + _bytes_in(answer)


def _bytes_in(answer: Answer) -> int:
    """Bytes of an answer's content."""
    if isinstance(answer, Delta):
        numbers = sum(1 + len(token.top) for token in answer.logprobs)
        ids = _TOKEN_BYTES * len(answer.tokens)
        calls = sum(_ANSWER_BYTES + len(piece.arguments.encode()) for piece in answer.tool_calls)
        text = len(answer.text.encode()) + len(answer.reasoning.encode())
        return text + calls + ids + _LOGPROB_BYTES * numbers
    if isinstance(answer, Tokens):
        return _TOKEN_BYTES * len(answer.tokens)
    return len(answer.text.encode()) if isinstance(answer, Detokenized) else 0


Kind = Literal["generate", "convert", "status"]


@dataclass(slots=True)
class OpenRequest:
    """A request without a terminal answer; times in seconds of the monotonic clock.

    The bytes of its pictures are in `slots`, once they are no more in `filling`, with the message
    to send then; `images` are the fields of its images and videos. Text that came before the
    scheduler's words is in `early`, each with the step it is of. The deltas `unsent`, by reply, are
    in the outbox, and grow until the client takes them. `replies` are the numbers of its replies,
    `rid` first; `ended` has the ends of those that ended.
    """

    rid: int
    id: str
    kind: Kind
    session: "Session"
    opened: float
    deadline: float | None
    timestamps: bool = False
    pins: bool = False
    accepted: bool = False
    next_seq: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    tokenize_s: float = 0.0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    first_left: float = 0.0
    detokenize_s: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted_tokens: int = 0
    early: list[tuple[RowDelta, Deltas]] = field(default_factory=list)
    chat: bool = False
    traceparent: str | None = None
    options: RequestOptions | None = None
    slots: Sequence[Slot] = ()
    filling: tuple[Filling, Request | Convert] | None = None
    unsent: dict[int, Delta] = field(default_factory=dict)
    images: Sequence[str] = ()
    images_s: float = 0.0
    embedded: Embedded | None = None
    replies: list[int] = field(default_factory=list)
    reply_tokens: Counter[int] = field(default_factory=Counter)
    ended: dict[int, Ended] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Session:
    """One connection that has said hello; `delimited` ones get an empty frame before answers.

    `number` is unique as long as the daemon runs; `connection` is the number of its connection,
    which no other connection gets. `peer` identifies the client, whatever it calls itself:
    `uid:N` on the local socket, `key:PUBLICKEY` on TCP. `status_only` ones may ask for
    nothing but `status`: one of them has a place beyond the limit. `key` is what its connection has
    shown on TCP, '' on the local socket. `tokens` are those of its replies that have ended.
    `features` are what its client reads beyond the first version, by name. `expires` is by the
    door's running clock, as all times of leases are. `generations` counts the replies of those
    among the open ones. One that `pins` has asked the prefix cache to keep something, `pinned`
    tokens of prompts that have run.
    """

    connection: int
    number: int
    client: str
    lease_s: float
    expires: float
    outbox: Outbox
    delimited: bool = False
    status_only: bool = False
    tokens: int = 0
    open: dict[str, OpenRequest] = field(default_factory=dict)
    generations: int = 0
    key: str = ""
    peer: str = ""
    pins: bool = False
    pinned: int = 0
    features: frozenset[str] = frozenset()

    @property
    def is_idle(self) -> bool:
        """True if the session counts against the limit of clients and waits for nothing."""
        return not (self.status_only or self.open or self.outbox)


class Sessions:
    """All sessions and open requests; request ids are per session, `rid` counts them all.

    Whoever gets a request back from `close` owns its terminal answer, so there is exactly one.
    `release` is called with the slots of a request that was closed.
    """

    def __init__(
        self,
        settings: Reloadable[DoorSettings],
        release: Callable[[Sequence[Slot]], None] | None = None,
    ) -> None:
        self._release = release
        self._settings = settings
        self._by_connection: dict[int, Session] = {}
        self._by_rid: dict[int, OpenRequest] = {}
        self._by_sibling: dict[int, OpenRequest] = {}
        self.generations = 0
        self._numbers = count(1)
        self._rids = count(1)

    def __len__(self) -> int:
        return len(self._by_connection)

    @property
    def busy(self) -> bool:
        """True if any request is without a terminal answer."""
        return bool(self._by_rid)

    @property
    def open_requests(self) -> list[OpenRequest]:
        """All requests without a terminal answer."""
        return list(self._by_rid.values())

    def all(self) -> list[Session]:
        """All sessions."""
        return list(self._by_connection.values())

    def get(self, connection: int) -> Session | None:
        """The session of a connection, if it has one."""
        return self._by_connection.get(connection)

    def giving_way(self, peer: str, *, pins: bool = False) -> Session | None:
        """The session that has to go so that `peer` has a place, or with `pins` may pin.

        It has nothing open, and is of the peer that has the most places, two more than `peer` at
        least, or has pinned the most, more than `peer`: the one that was silent longest. None where
        there is none.
        """
        have = Counter[str]()
        for one in self.all():
            have[one.peer] += one.pinned if pins else not one.status_only
        for other, most in have.most_common():
            if most < have[peer] + 1 + (not pins):
                break
            idle = [one for one in self.all() if one.peer == other and one.is_idle]
            if pins:
                idle = [one for one in idle if one.pinned]
            if idle:
                return min(idle, key=lambda one: one.expires - one.lease_s)
        return None

    @property
    def full(self) -> bool:
        """True if no further client can connect."""
        return len(self._by_connection) >= self._settings.current.clients

    def greet(
        self,
        connection: int,
        client: str,
        lease_s: float,
        now: float,
        *,
        status_only: bool = False,
        key: str = "",
        peer: str = "",
    ) -> Session:
        """Open a session, or renew it with a new lease; raises HearthError where it cannot."""
        session = self._by_connection.get(connection)
        if session is None:
            limit = self._settings.current.clients
            if len(self._by_connection) >= limit + status_only:
                raise HearthError(
                    "too_many_clients",
                    f"the daemon serves {limit} clients, its limit: try again later",
                )
            session = Session(
                connection,
                next(self._numbers),
                client,
                lease_s,
                now + lease_s,
                Outbox(),
                status_only=status_only,
                key=key,
                peer=peer,
            )
            self._by_connection[connection] = session
        elif session.status_only != status_only:
            raise HearthError(
                "invalid_value", "status_only stays what it was at the first hello", "status_only"
            )
        session.client, session.lease_s = client, lease_s
        self.renew(session, now)
        return session

    def renew(self, session: Session, now: float) -> None:
        """Start the lease again: the client has sent something."""
        session.expires = now + session.lease_s

    def admit(
        self,
        session: Session,
        request_id: str,
        kind: Kind,
        now: float,
        deadline: float | None,
        *,
        replies: int = 1,
    ) -> OpenRequest:
        """Enter a request in the table; raises `duplicate_id` or `too_many_requests`."""
        if request_id in session.open:
            raise HearthError(
                "duplicate_id",
                f"request {request_id!r} is still open: give every request an id of its own",
                "id",
            )
        limit = self._settings.current.requests_per_client
        if len(session.open) >= limit:
            raise HearthError(
                "too_many_requests",
                f"{limit} requests of this client are open, its limit: wait for one to end",
            )
        rids = [next(self._rids) for _ in range(replies)]
        request = OpenRequest(rids[0], request_id, kind, session, now, deadline, replies=rids)
        self._by_sibling.update(dict.fromkeys(rids[1:], request))
        self._by_rid[request.rid] = session.open[request_id] = request
        self._count(request, 1)
        return request

    def find(self, rid: int) -> OpenRequest | None:
        """The open request of that number, or with a reply of that number."""
        return self._by_rid.get(rid) or self._by_sibling.get(rid)

    def close(self, request: OpenRequest) -> bool:
        """Take a request out; True for the one caller that owes the terminal answer."""
        if self._by_rid.pop(request.rid, None) is None:
            return False
        for sibling in request.replies[1:]:
            del self._by_sibling[sibling]
        del request.session.open[request.id]
        self._count(request, -1)
        if request.slots and self._release is not None:
            self._release(request.slots)
        return True

    def drop(self, session: Session) -> list[OpenRequest]:
        """Forget a session; returns its requests, which are closed and get no answer."""
        self._by_connection.pop(session.connection, None)
        requests = list(session.open.values())
        for request in requests:
            self.close(request)
        return requests

    def expired(self, now: float) -> list[Session]:
        """Sessions whose lease has run out."""
        return [session for session in self._by_connection.values() if session.expires <= now]

    def overdue(self, now: float) -> list[OpenRequest]:
        """Requests whose deadline has passed."""
        return [
            request
            for request in self._by_rid.values()
            if request.deadline is not None and request.deadline <= now
        ]

    def _count(self, request: OpenRequest, change: int) -> None:
        if request.kind == "generate":
            self.generations += change * len(request.replies)
            request.session.generations += change * len(request.replies)
