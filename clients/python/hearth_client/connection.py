"""The conversation with a daemon, apart from any I/O: bytes in, answered requests out."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeVar, get_args

import msgspec

from hearth_client.errors import (
    ConnectionLost,
    HearthClientError,
    ImageTooLarge,
    InvalidValue,
    MessageTooLarge,
    ProtocolViolation,
    UnsupportedOption,
    UnsupportedProtocol,
    error_for,
)
from hearth_client.pictures import Frame
from hearth_client.protocol import (
    PROTOCOL,
    Accepted,
    Bye,
    Cancel,
    Delta,
    Detokenize,
    Detokenized,
    Done,
    Error,
    Hello,
    Lease,
    Leased,
    Request,
    ServerMessage,
    Status,
    StatusReport,
    Tokenize,
    Tokens,
    Welcome,
)

Reply = Tokens | Detokenized | StatusReport
ReplyT = TypeVar("ReplyT", Tokens, Detokenized, StatusReport)
FEATURES = ("reasoning", "tool_calls", "end_details")
"""Features of the protocol that a client has unless it is told others."""
RENEWALS = 3
"""Renewals in the time of a lease: two of them may be late."""
_SHORTEST_RENEWAL_S = 0.01
"""The shortest time between two of them, whatever lease is given."""

_ENDS_WITH: dict[type[Request], type[Reply]] = {
    Tokenize: Tokens,
    Detokenize: Detokenized,
    Status: StatusReport,
}


class _Kind(msgspec.Struct):
    t: str


_KIND_DECODER = msgspec.msgpack.Decoder(_Kind)
_KINDS = {kind.__struct_config__.tag for kind in get_args(ServerMessage)}


class Exchange:
    """Answers to one request so far, filled by its Connection.

    `deltas` holds those not yet taken by the reader. `ended` turns true with `done`, a `reply` or
    an `error`, whichever comes; `ends_with` is the kind of answer that may.
    """

    __slots__ = ("accepted", "deltas", "done", "ends_with", "error", "id", "next_seq", "reply")

    def __init__(self, request_id: str) -> None:
        self.id: str = request_id
        self.ends_with: type[Done | Reply] = Done
        self.accepted: Accepted | None = None
        self.deltas: deque[Delta] = deque()
        self.next_seq: int = 0
        self.done: Done | None = None
        self.reply: Reply | None = None
        self.error: HearthClientError | None = None

    @property
    def ended(self) -> bool:
        """True if no further answer will follow."""
        return self.error is not None or self.done is not None or self.reply is not None


def reply_of(exchange: Exchange, kind: type[ReplyT]) -> ReplyT:
    """The reply of an exchange that has ended; raises its error."""
    if exchange.error is not None:
        raise exchange.error
    if not isinstance(exchange.reply, kind):
        raise ProtocolViolation("the server answered with another kind of message")
    return exchange.reply


class Connection:
    """One session: its handshake, its open requests and its lease.

    Times are seconds of any steady clock. Renewals come often enough for the server's lease and
    for a caller who takes `silence_s` without an answer as a loss.
    """

    def __init__(
        self,
        client: str,
        lease_s: float | None,
        silence_s: float,
        *,
        status_only: bool = False,
        features: Sequence[str] = (),
    ) -> None:
        self.welcome: Welcome | None = None
        self.failure: HearthClientError | None = None
        self.renew_at: float = float("inf")
        self._hello = Hello(
            proto=[PROTOCOL],
            client=client,
            lease_s=lease_s,
            status_only=status_only,
            features=list(features),
        )
        self._says_less = False
        self._silence_s = silence_s
        self._open: dict[str, Exchange] = {}
        self._numbers = count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ServerMessage)

    @property
    def open(self) -> int:
        """Requests without a terminal answer."""
        return len(self._open)

    def hello(self) -> bytes:
        """The first message of a session; `welcome` or `failure` is set by its answer."""
        self.welcome = self.failure = None
        return self._encoder.encode(self._hello)

    def hello_again(self) -> bytes | None:
        """The first message without features, once, for a server of 0.1.0 has refused them."""
        again, self._says_less = self._says_less, False
        return self.hello() if again else None

    def request(
        self, build: Callable[[str], Request], now: float, frames: Sequence[Frame] = ()
    ) -> tuple[Exchange, bytes]:
        """Open a request: `build` gets its id; the bytes are to be sent, and `frames` behind them.

        Raises RequestRefused for a request that is not to be sent.
        """
        exchange = Exchange(str(next(self._numbers)))
        message = build(exchange.id)
        exchange.ends_with = _ENDS_WITH.get(type(message), Done)
        data = self._encode(message)
        self._check_size(data)
        if frames:
            self._check_frames(frames)
        self._open[exchange.id] = exchange
        self._renewed(now)
        return exchange, data

    def cancel(self, exchange: Exchange) -> bytes | None:
        """The message that ends a generation; None when it has ended."""
        return None if exchange.ended else self._encoder.encode(Cancel(id=exchange.id))

    def renewal(self, now: float) -> bytes | None:
        """The message that renews the lease, when it is time for it."""
        if now < self.renew_at:
            return None
        self._renewed(now)
        return self._encoder.encode(Lease())

    def farewell(self) -> bytes:
        """The last message of a session."""
        return self._encoder.encode(Bye())

    def receive(self, data: bytes, now: float) -> Exchange | None:
        """Take one message in; returns the request that it belongs to.

        A failure of the whole conversation sets `failure` and ends every open request with it.
        """
        try:
            message = self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            if _is_of_a_later_kind(data):
                return None
            self.lose(ProtocolViolation("the server sent a message that cannot be read"))
            return None
        if isinstance(message, Delta):
            return self._delta(message)
        if isinstance(message, (Welcome, Leased)):
            self._session(message, now)
            return None
        if isinstance(message, Error) and (not message.id or message.code == "hello_required"):
            self._fault(message)
            return None
        return self._other(message)

    def _fault(self, message: Error) -> None:
        refused = (message.code, message.field) == ("unsupported_option", "features")
        if refused and self.welcome is None and self._hello.features:
            self._hello.features, self._says_less = [], True
        elif message.code != "hello_required" or self.welcome is not None:
            # Before a welcome it answers what was sent before this hello.
            self.lose(error_for(message))

    def lose(self, error: HearthClientError) -> list[Exchange]:
        """End every open request with `error`; returns them."""
        self.failure = error
        self.renew_at = float("inf")
        ended = list(self._open.values())
        self._open.clear()
        for exchange in ended:
            exchange.error = error
        return ended

    def _encode(self, message: Request) -> bytes:
        try:
            return self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            names = message.__struct_fields__
            wrong = next((n for n in names if not self._can_encode(getattr(message, n))), "")
            raise InvalidValue(f"{wrong} holds a value that cannot be encoded", wrong) from error

    def _check_size(self, data: bytes) -> None:
        # The server could not say whose message it was, and would end no request with its answer.
        if self.welcome is not None and len(data) > self.welcome.limits.frame_bytes:
            limit = self.welcome.limits.frame_bytes
            raise MessageTooLarge(f"the message has {len(data)} bytes, the limit is {limit}")

    def _check_frames(self, frames: Sequence[Frame]) -> None:
        # A frame that the server does not expect may cost the connection, with all that is open.
        if self.welcome is None:
            return
        limits = self.welcome.limits
        if not limits.images:
            raise UnsupportedOption("the server's model takes no images", "messages")
        if len(frames) > limits.images:
            text = f"the request has {len(frames)} pictures, the limit is {limits.images}"
            raise InvalidValue(text, "messages")
        sizes = [len(frame) for frame in frames]
        if max(sizes) > limits.image_bytes:
            text = f"a picture has {max(sizes)} bytes, the limit is {limits.image_bytes}"
            raise ImageTooLarge(text, "messages")
        if sum(sizes) > limits.request_image_bytes:
            most = limits.request_image_bytes
            text = f"the pictures have {sum(sizes)} bytes together, the limit is {most}"
            raise ImageTooLarge(text, "messages")

    def _can_encode(self, value: object) -> bool:
        try:
            self._encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return False
        return True

    def _renewed(self, now: float) -> None:
        if self.welcome is not None:
            renewal_s = min(self.welcome.limits.lease_s, self._silence_s) / RENEWALS
            self.renew_at = now + max(renewal_s, _SHORTEST_RENEWAL_S)

    def _session(self, message: Welcome | Leased, now: float) -> None:
        if not isinstance(message, Welcome):
            return
        lease_s = message.limits.lease_s
        if message.proto != PROTOCOL:
            text = f"the server speaks protocol {message.proto}, which was not offered"
            self.lose(UnsupportedProtocol(text, "proto"))
        elif not (math.isfinite(lease_s) and lease_s > 0):
            self.lose(ProtocolViolation(f"the server gives a lease of {lease_s} s", "lease_s"))
        elif self.welcome is not None and self.welcome.epoch != message.epoch:
            self.lose(ConnectionLost("the daemon was restarted"))
        else:
            self.welcome = message
            self._renewed(now)

    def _delta(self, message: Delta) -> Exchange | None:
        exchange = self._open.get(message.id)
        if exchange is None:
            return None
        if exchange.ends_with is not Done:
            return self._of_another_kind(exchange)
        if message.seq != exchange.next_seq:
            del self._open[message.id]
            exchange.error = ProtocolViolation(
                f"delta {message.seq} came where {exchange.next_seq} was due", "seq"
            )
            return exchange
        exchange.next_seq += 1
        exchange.deltas.append(message)
        return exchange

    def _other(self, message: Accepted | Done | Error | Reply) -> Exchange | None:
        exchange = self._open.get(message.id)
        if exchange is None:
            return None
        if isinstance(message, Accepted) and exchange.ends_with is Done:
            exchange.accepted = exchange.accepted or message
            return exchange
        if not isinstance(message, (Error, exchange.ends_with)):
            return self._of_another_kind(exchange)
        del self._open[message.id]
        if isinstance(message, Error):
            exchange.error = error_for(message)
        elif isinstance(message, Done):
            exchange.done = message
        else:
            exchange.reply = message
        return exchange

    def _of_another_kind(self, exchange: Exchange) -> Exchange:
        del self._open[exchange.id]
        exchange.error = ProtocolViolation("the server answered with another kind of message")
        return exchange


def _is_of_a_later_kind(data: bytes) -> bool:
    """True if this is an answer of a kind that only newer servers have, which is to be ignored."""
    try:
        return _KIND_DECODER.decode(data).t not in _KINDS
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
