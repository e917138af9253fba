from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth_client.connection import Connection, Exchange, reply_of
from hearth_client.errors import (
    ConnectionLost,
    HearthClientError,
    ImageTooLarge,
    InvalidValue,
    LeaseExpired,
    MessageTooLarge,
    ProtocolViolation,
    QueueFull,
    RequestRefused,
    UnsupportedOption,
    UnsupportedProtocol,
)
from hearth_client.protocol import (
    Accepted,
    Answer,
    Delta,
    Done,
    Error,
    Generate,
    Leased,
    Limits,
    StatusReport,
    Tokenize,
    Tokens,
    Usage,
    Welcome,
)
from hearth_client.running_clock import RunningClock

encode = msgspec.msgpack.encode
LIMITS = Limits(
    frame_bytes=1000,
    frames=1,
    requests_per_client=2,
    prompt_tokens=3,
    total_tokens=4,
    queued_requests=5,
    queued_tokens=6,
    lease_s=30.0,
)


def welcome(epoch: str = "one") -> bytes:
    return encode(Welcome(proto=1, server="x", limits=LIMITS, epoch=epoch))


def test_features_are_left_out_for_a_server_that_does_not_know_them() -> None:
    connection = Connection("test", None, 9.0, features=["reasoning"])
    assert b"features" in connection.hello()
    refusal = Error(code="unsupported_option", message="it is no field here", field="features")
    connection.receive(encode(refusal), 0.0)
    again = connection.hello_again()
    assert again is not None
    assert b"features" not in again
    assert connection.failure is None
    assert connection.hello_again() is None
    connection.receive(encode(refusal), 0.0)
    assert isinstance(connection.failure, UnsupportedOption)


def opened(silence_s: float = 90.0) -> Connection:
    connection = Connection("test", None, silence_s)
    connection.hello()
    connection.receive(welcome(), 0.0)
    return connection


def begin(connection: Connection, now: float = 0.0) -> Exchange:
    exchange, data = connection.request(lambda i: Generate(id=i, prompt="x"), now)
    assert msgspec.msgpack.decode(data) == {"t": "generate", "id": exchange.id, "prompt": "x"}
    return exchange


def delta(exchange: Exchange, seq: int) -> bytes:
    return encode(Delta(id=exchange.id, seq=seq, text=str(seq), tokens=[seq]))


def done(exchange: Exchange) -> bytes:
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    return encode(Done(id=exchange.id, reason="stop", usage=usage))


def test_the_handshake() -> None:
    connection = Connection("me", 5.0, 60.0)
    hello: dict[str, Any] = msgspec.msgpack.decode(connection.hello())
    assert hello == {"t": "hello", "proto": [1], "client": "me", "lease_s": 5.0}
    connection.receive(welcome(), 0.0)
    assert connection.welcome is not None
    assert connection.welcome.limits == LIMITS


def test_a_refused_handshake_is_a_failure() -> None:
    connection = Connection("me", None, 60.0)
    connection.hello()
    connection.receive(encode(Error(code="too_many_clients", message="full")), 0.0)
    assert connection.failure is not None
    assert connection.failure.code == "too_many_clients"
    again = Connection("me", None, 60.0)
    again.lose(QueueFull("busy"))
    again.hello()
    assert again.failure is None


def test_answers_go_to_their_requests() -> None:
    connection = opened()
    first, second = begin(connection), begin(connection)
    assert first.id != second.id
    assert connection.receive(encode(Accepted(id=second.id, prompt_tokens=4)), 0.0) is second
    for data in (delta(first, 0), delta(second, 0), delta(first, 1)):
        connection.receive(data, 0.0)
    assert [d.text for d in first.deltas] == ["0", "1"]
    assert [d.text for d in second.deltas] == ["0"]
    assert second.accepted == Accepted(id=second.id, prompt_tokens=4)
    assert connection.receive(done(first), 0.0) is first
    assert (first.ended, second.ended, connection.open) == (True, False, 1)
    assert connection.receive(delta(first, 2), 0.0) is None, "nothing follows the end"
    assert connection.receive(done(first), 0.0) is None
    assert len(first.deltas) == 2


def test_an_error_ends_one_request() -> None:
    connection = opened()
    first, second = begin(connection), begin(connection)
    connection.receive(encode(Error(id=first.id, code="queue_full", message="busy")), 0.0)
    assert isinstance(first.error, QueueFull)
    assert not second.ended
    assert connection.cancel(first) is None
    assert connection.cancel(second) == encode({"t": "cancel", "id": second.id})


def test_an_error_of_the_session_ends_all() -> None:
    connection = opened()
    exchanges = [begin(connection), begin(connection)]
    connection.receive(encode(Error(code="lease_expired", message="silence")), 0.0)
    assert all(isinstance(exchange.error, LeaseExpired) for exchange in exchanges)
    assert connection.open == 0
    assert connection.renewal(1e9) is None


def test_another_epoch_means_that_requests_are_lost() -> None:
    connection = opened()
    exchange = begin(connection)
    connection.receive(welcome("one"), 1.0)
    assert not exchange.ended
    connection.receive(welcome("two"), 2.0)
    assert isinstance(exchange.error, ConnectionLost)


def test_a_gap_is_a_violation() -> None:
    connection = opened()
    exchange = begin(connection)
    connection.receive(delta(exchange, 0), 0.0)
    connection.receive(delta(exchange, 2), 0.0)
    assert isinstance(exchange.error, ProtocolViolation)
    assert exchange.error.field == "seq"


def test_words_of_a_later_server_are_kept_or_ignored() -> None:
    connection = opened()
    exchange = begin(connection)
    assert connection.receive(encode({"t": "weather", "id": exchange.id}), 0.0) is None
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    later = {"t": "done", "id": exchange.id, "reason": "tool_call", "usage": usage}
    connection.receive(encode(later), 0.0)
    assert connection.failure is None
    assert exchange.done is not None
    assert exchange.done.reason == "tool_call"


@given(st.binary(max_size=80))
def test_unreadable_answers_end_the_conversation(data: bytes) -> None:
    connection = opened()
    exchange = begin(connection)
    connection.receive(b"\xc1" + data, 0.0)
    assert isinstance(connection.failure, ProtocolViolation)
    assert isinstance(exchange.error, ProtocolViolation)


def test_the_lease_is_renewed_in_time_and_not_too_often() -> None:
    connection = opened()
    assert connection.renewal(9.9) is None
    assert connection.renewal(10.0) == encode({"t": "lease"})
    assert connection.renewal(10.1) is None
    begin(connection, now=15.0)
    assert connection.renewal(20.1) is None, "a request renews as well"
    assert connection.renewal(25.0) is not None
    connection.receive(encode(Leased(seconds=30.0)), 25.1)
    assert opened(silence_s=6.0).renewal(2.0) is not None, "the daemon is asked for signs of life"


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lease_that_cannot_be_ends_the_session(lease_s: float) -> None:
    connection = opened()
    exchange = begin(connection)
    limits = structs.replace(LIMITS, lease_s=lease_s)
    connection.receive(encode(Welcome(proto=1, server="x", limits=limits, epoch="one")), 0.0)
    assert isinstance(exchange.error, ProtocolViolation)
    assert exchange.error.field == "lease_s"


def test_a_lease_of_any_length_is_kept() -> None:
    for lease_s, renewed_s in ((1e-300, 0.01), (1e308, 30.0)):
        connection = opened()
        limits = structs.replace(LIMITS, lease_s=lease_s)
        connection.receive(encode(Welcome(proto=1, server="x", limits=limits, epoch="one")), 0.0)
        assert connection.renew_at == renewed_s


def test_a_protocol_that_was_not_offered_ends_the_session() -> None:
    connection = Connection("test", None, 9.0)
    connection.hello()
    connection.receive(encode(Welcome(proto=2, server="x", limits=LIMITS)), 0.0)
    assert isinstance(connection.failure, UnsupportedProtocol)
    assert connection.welcome is None


def test_the_first_accepted_counts() -> None:
    connection = opened()
    exchange = begin(connection)
    for tokens in (3, 4):
        connection.receive(encode(Accepted(id=exchange.id, prompt_tokens=tokens)), 0.0)
    assert exchange.accepted is not None
    assert exchange.accepted.prompt_tokens == 3


@pytest.mark.parametrize(
    "answer", [lambda i: Accepted(id=i, prompt_tokens=1), lambda i: Delta(id=i, seq=0, text="x")]
)
def test_what_a_generation_alone_has_ends_other_requests(answer: Callable[[str], Answer]) -> None:
    connection = opened()
    exchange, _ = connection.request(lambda i: Tokenize(id=i, text="x"), 0.0)
    assert connection.receive(encode(answer(exchange.id)), 0.0) is exchange
    assert isinstance(exchange.error, ProtocolViolation)
    assert connection.open == 0


def test_a_reply_must_be_of_the_kind_asked_for() -> None:
    connection = opened()
    exchange, _ = connection.request(lambda i: Tokenize(id=i, text="x"), 0.0)
    connection.receive(encode(Tokens(id=exchange.id, tokens=[1])), 0.0)
    assert reply_of(exchange, Tokens).tokens == [1]
    with pytest.raises(ProtocolViolation):
        reply_of(exchange, StatusReport)
    exchange.error = QueueFull("busy")
    with pytest.raises(QueueFull):
        reply_of(exchange, Tokens)


def test_a_request_ends_with_its_own_kind_of_answer_alone() -> None:
    connection = opened()
    asked, _ = connection.request(lambda i: Tokenize(id=i, text="x"), 0.0)
    generation, other = begin(connection), begin(connection)
    connection.receive(done(asked), 0.0)
    connection.receive(encode(Tokens(id=generation.id, tokens=[1])), 0.0)
    for exchange in (asked, generation):
        assert isinstance(exchange.error, ProtocolViolation)
        assert exchange.done is None
        assert exchange.reply is None
    connection.receive(done(other), 0.0)
    assert other.done is not None


def test_a_session_that_the_server_forgot_is_lost_by_any_answer_that_says_so() -> None:
    forgotten = Error(code="hello_required", message="who are you?")
    connection = opened()
    exchanges = [begin(connection), begin(connection)]
    connection.receive(encode(structs.replace(forgotten, id=exchanges[1].id)), 0.0)
    for exchange in exchanges:
        assert isinstance(exchange.error, ConnectionLost)
        assert exchange.error.code == "connection_lost"
    connection.hello()
    # It answers what was sent before.
    connection.receive(encode(forgotten), 0.0)
    assert connection.failure is None
    connection.receive(welcome(), 0.0)
    assert connection.welcome is not None


def test_limits_that_are_not_known_yet_hold_nothing_up() -> None:
    connection = Connection("test", None, 9.0)
    connection.hello()
    exchange, _ = connection.request(lambda i: Generate(id=i, prompt="x"), 0.0, [b"1"])
    assert not exchange.ended
    assert connection.renewal(1e9) is None


def replace(message: Generate, request_id: str) -> Generate:
    return structs.replace(message, id=request_id)


def test_values_that_cannot_be_encoded_open_nothing() -> None:
    connection = opened()
    wrong: Any = {object()}
    for value in (wrong, 1 << 80):
        message = Generate(id="1", prompt="x", seed=value)
        with pytest.raises(InvalidValue, match="seed holds a value") as caught:
            connection.request(partial(replace, message), 0.0)
        assert caught.value.field == "seed"
    assert connection.open == 0
    assert issubclass(InvalidValue, HearthClientError)


def test_a_message_above_the_limit_opens_nothing_and_disturbs_nobody() -> None:
    connection = opened()
    other = begin(connection)
    with pytest.raises(MessageTooLarge, match="the limit is 1000"):
        connection.request(lambda i: Generate(id=i, prompt="x" * 1000), 0.0)
    assert connection.open == 1
    connection.receive(done(other), 0.0)
    assert other.ended
    assert other.error is None


def test_pictures_that_the_server_does_not_take_are_not_sent() -> None:
    connection = opened()
    frames = [b"12345678"]

    def refused() -> type[Exception]:
        with pytest.raises(RequestRefused) as caught:
            connection.request(lambda i: Generate(id=i, prompt="x"), 0.0, frames)
        assert connection.open == 0
        return caught.type

    assert refused() is UnsupportedOption
    sees = structs.replace(LIMITS, images=2, image_bytes=8, request_image_bytes=16)
    connection.receive(encode(Welcome(proto=1, server="x", limits=sees, epoch="one")), 0.0)
    connection.request(lambda i: Generate(id=i, prompt="x"), 0.0, frames * 2)
    connection.lose(ConnectionLost("x"))
    frames = [b"12345678"] * 3
    assert refused() is InvalidValue
    frames = [b"123456789"]
    assert refused() is ImageTooLarge
    sees = structs.replace(sees, request_image_bytes=15)
    connection.receive(encode(Welcome(proto=1, server="x", limits=sees, epoch="one")), 0.0)
    frames = [b"12345678"] * 2
    assert refused() is ImageTooLarge


class Source:
    """A steady clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize("gap", [0.0, 0.25, 0.5])
def test_time_that_is_read_often_counts(gap: float) -> None:
    source = Source()
    clock = RunningClock(0.5, source)
    for _ in range(8):
        source.seconds += gap
        clock.now()
    assert clock.now() == 8 * gap


def test_standing_still_counts_for_little() -> None:
    source = Source()
    clock = RunningClock(0.5, source)
    source.seconds += 0.25
    clock.now()
    source.seconds += 3600
    assert clock.now() == 0.75
    source.seconds += 0.25
    assert clock.now() == 1.0


def test_it_follows_the_steady_clock() -> None:
    clock = RunningClock(60.0)
    first = clock.now()
    assert first >= 0
    assert clock.now() >= first
