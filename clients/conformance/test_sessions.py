"""Sessions with a scripted ROUTER: hello, lease, silence, loss, and the end."""

import socket
import time
from itertools import pairwise
from pathlib import Path

import pytest
import zmq

from clients.conformance.conftest import Drive
from clients.conformance.driving import Driver
from clients.conformance.scripted import LIMITS, Peer, done, welcome

LEASE_S = 1.0


def failed(driver: Driver, name: str | None = None) -> tuple[str, str]:
    """Code and kind of what failed: a request, or the session."""
    end = driver.expect("failed", name)
    return end["code"], end["kind"]


def test_hello_says_what_was_asked(driver: Driver, peer: Peer) -> None:
    hello = peer.greet(driver, lease_s=12.5, name="nämed", features=["reasoning"])
    assert (hello["proto"], hello["client"]) == ([1], "nämed")
    assert (hello["lease_s"], hello["features"]) == (12.5, ["reasoning"])
    assert not hello.get("status_only")


def test_hello_names_all_that_the_client_reads(driver: Driver, peer: Peer) -> None:
    hello = peer.greet(driver)
    assert {"reasoning", "tool_calls", "end_details", "token_bytes"} <= set(hello["features"])
    assert hello.get("lease_s") is None


def test_hello_without_features(driver: Driver, peer: Peer) -> None:
    assert not peer.greet(driver, features=[]).get("features")


def test_an_old_server_is_greeted_again_without_features(driver: Driver, peer: Peer) -> None:
    driver.do("connect")
    assert peer.take("hello")["features"]
    refusal = {"code": "unsupported_option", "message": "No.", "field": "features"}
    peer.say(t="error", id="", **refusal)
    assert not peer.welcome().get("features")
    driver.expect("connected")
    peer.serves(driver)


def test_features_are_refused_once_and_not_for_ever(driver: Driver, peer: Peer) -> None:
    driver.do("connect")
    for _ in range(2):
        peer.take("hello")
        refusal = {"code": "unsupported_option", "message": "No.", "field": "features"}
        peer.say(t="error", **refusal)
    assert failed(driver) == ("unsupported_option", "request")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("unsupported_protocol", "connection"),
        ("too_many_clients", "service"),
        ("invalid_value", "request"),
        ("brand_new", "service"),
    ],
)
def test_a_refused_hello_fails_to_connect(driver: Driver, peer: Peer, code: str, kind: str) -> None:
    driver.do("connect")
    peer.take("hello")
    peer.say(t="error", code=code, message="No.", retry_after_s=1.5)
    end = driver.expect("failed")
    assert (end["code"], end["kind"], end["retry_after_s"]) == (code, kind, 1.5)
    peer.greet(driver)
    peer.serves(driver)


def test_no_welcome_in_time(driver: Driver, peer: Peer) -> None:
    driver.do("connect", timeout_s=0.5)
    peer.take("hello")
    assert failed(driver) == ("connection_timeout", "connection")
    peer.greet(driver)
    peer.serves(driver)


def test_nobody_listens(drive: Drive, short_folder: Path) -> None:
    driver = drive(short_folder / "none")
    driver.do("connect")
    assert failed(driver) == ("connection_refused", "connection")
    assert [one["event"] for one in driver.close()] == ["closed"]


def test_a_socket_that_nobody_serves(drive: Drive, short_folder: Path) -> None:
    path = short_folder / "dead"
    with socket.socket(socket.AF_UNIX) as once:
        once.bind(str(path))
    driver = drive(path)
    driver.do("connect")
    assert failed(driver) == ("connection_refused", "connection")


def leases(peer: Peer, request: str, count: int) -> list[float]:
    """Times of so many leases, while deltas of a request come all the time."""
    seen: list[float] = []
    seq = 0
    limit = time.monotonic() + 10 * LEASE_S
    while len(seen) < count and time.monotonic() < limit:
        message = peer.next(time.monotonic() + LEASE_S / 20)
        if message is None:
            peer.say(t="delta", id=request, seq=seq, text="x", tokens=[seq])
            seq += 1
        else:
            assert message["t"] == "lease", message
            assert set(message) == {"t"}
            seen.append(time.monotonic())
            peer.say(t="leased", seconds=LEASE_S)
    return seen


@pytest.mark.parametrize("program", ["reads", "pauses"])
def test_the_lease_is_kept_by_the_clock(driver: Driver, peer: Peer, program: str) -> None:
    driver.do("connect", lease_s=LEASE_S)
    peer.welcome(limits={**LIMITS, "lease_s": LEASE_S})
    driver.expect("connected")
    began = time.monotonic()
    driver.generate("a", prompt="x", read=program == "reads")
    request = peer.take("generate")["id"]
    peer.say(t="accepted", id=request, prompt_tokens=1)
    seen = [began, *leases(peer, request, 5)]
    # Each renews in time, and none is sent for each delta.
    gaps = [after - before for before, after in pairwise(seen)]
    assert len(gaps) == 5
    assert max(gaps) < LEASE_S
    assert seen[-1] - began > LEASE_S
    peer.say(id=request, **done())
    if program == "pauses":
        driver.do("read", "a")
    assert driver.answered("a").end["event"] == "done"


def test_the_lease_is_kept_while_nothing_is_asked(driver: Driver, peer: Peer) -> None:
    driver.do("connect", lease_s=LEASE_S)
    peer.welcome(limits={**LIMITS, "lease_s": LEASE_S})
    driver.expect("connected")
    for _ in range(4):
        message = peer.next(time.monotonic() + LEASE_S)
        assert message == {"t": "lease"}
        peer.say(t="leased", seconds=LEASE_S)
    peer.serves(driver)


@pytest.mark.parametrize("lease_s", [0, -1.5, float("nan"), float("inf")])
def test_a_lease_that_cannot_be_ends_the_session(
    driver: Driver, peer: Peer, lease_s: float
) -> None:
    wrong = {**LIMITS, "lease_s": lease_s}
    driver.do("connect")
    peer.welcome(limits=wrong)
    assert failed(driver) == ("protocol_violation", "connection")
    peer.greet(driver)
    peer.start(driver, "a")
    peer.say(**welcome(limits=wrong))
    assert failed(driver, "a") == ("protocol_violation", "connection")
    peer.greet(driver)
    peer.serves(driver)


def test_a_short_lease_is_no_storm(driver: Driver, peer: Peer) -> None:
    driver.do("connect")
    peer.welcome(limits={**LIMITS, "lease_s": 1e-300})
    driver.expect("connected")
    began = time.monotonic()
    for _ in range(50):
        assert peer.next(began + 20 * LEASE_S) == {"t": "lease"}
        peer.say(t="leased", seconds=1e-300)
    assert time.monotonic() - began > 0.4
    peer.serves(driver)


def test_a_long_lease(driver: Driver, peer: Peer) -> None:
    driver.do("connect", silence_s=LEASE_S)
    peer.welcome(limits={**LIMITS, "lease_s": 1e308})
    driver.expect("connected")
    assert peer.next(time.monotonic() + LEASE_S) == {"t": "lease"}
    peer.say(t="leased", seconds=1e308)
    peer.serves(driver)


def test_another_protocol_is_refused(driver: Driver, peer: Peer) -> None:
    driver.do("connect")
    peer.welcome(proto=2)
    assert failed(driver) == ("unsupported_protocol", "connection")
    peer.greet(driver)
    peer.serves(driver)


def test_silence_is_a_loss(driver: Driver, peer: Peer) -> None:
    driver.do("connect", silence_s=LEASE_S)
    peer.welcome()
    driver.expect("connected")
    peer.start(driver, "a")
    peer.start(driver, "b")
    # It asks by a lease before it gives up.
    assert peer.next(time.monotonic() + LEASE_S) == {"t": "lease"}
    began = time.monotonic()
    for name in "ab":
        assert failed(driver, name) == ("connection_timeout", "connection")
    assert time.monotonic() - began < 5 * LEASE_S


def test_a_lease_that_is_answered_is_no_silence(driver: Driver, peer: Peer) -> None:
    driver.do("connect", silence_s=LEASE_S)
    peer.welcome()
    driver.expect("connected")
    request = peer.start(driver, "a")
    for _ in range(5):
        assert peer.next(time.monotonic() + LEASE_S) == {"t": "lease"}
        peer.say(t="leased", seconds=30.0)
    peer.finish(request, "late")
    assert driver.answered("a").joined() == "late"


def lost(driver: Driver, *names: str) -> None:
    """Check that requests have ended with the connection."""
    for name in names:
        assert failed(driver, name) == ("connection_lost", "connection")


def test_hello_required_loses_everything_once(driver: Driver, peer: Peer) -> None:
    peer.greet(driver)
    old = peer.start(driver, "a")
    peer.start(driver, "b")
    for _ in range(3):
        peer.say(t="error", code="hello_required", message="Who are you?")
    lost(driver, "a", "b")
    driver.do("connect")
    peer.take("hello")
    for _ in range(3):
        peer.say(t="error", code="hello_required", message="Who are you?")
    peer.say(**welcome(epoch="second"))
    assert driver.expect("connected")["welcome"]["epoch"] == "second"
    peer.say(t="delta", id=old, seq=0, text="late")
    peer.serves(driver)


def test_the_next_request_opens_a_session_by_itself(driver: Driver, peer: Peer) -> None:
    peer.greet(driver)
    peer.start(driver, "a")
    peer.say(t="error", code="hello_required", message="Who are you?")
    lost(driver, "a")
    driver.generate("b", prompt="Tell")
    peer.welcome(epoch="second")
    peer.finish(peer.take("generate")["id"], "again")
    assert driver.answered("b").joined() == "again"


def test_hello_required_for_a_request_loses_the_session(driver: Driver, peer: Peer) -> None:
    peer.greet(driver)
    request = peer.start(driver, "a")
    peer.start(driver, "b")
    peer.say(t="error", id=request, code="hello_required", message="Who are you?")
    lost(driver, "a", "b")
    peer.greet(driver)
    peer.serves(driver)


def test_another_epoch_loses_everything(driver: Driver, peer: Peer) -> None:
    peer.greet(driver)
    peer.start(driver, "a")
    peer.say(**welcome(epoch="second"))
    lost(driver, "a")


def test_a_lease_that_expired_ends_the_session(driver: Driver, peer: Peer) -> None:
    peer.greet(driver)
    request = peer.start(driver, "a")
    peer.say(t="error", id=request, code="lease_expired", message="Too late.")
    peer.say(t="error", id="", code="lease_expired", message="Too late.")
    assert failed(driver, "a") == ("lease_expired", "service")
    peer.greet(driver)
    peer.serves(driver)


def test_a_daemon_that_dies_is_noticed_at_once(drive: Drive, short_folder: Path) -> None:
    path = short_folder / "s"
    with zmq.Context() as context:
        driver = drive(path)
        with Peer(path, context) as peer:
            peer.greet(driver)
            peer.start(driver, "a")
            peer.start(driver, "b", prompt="y")
        lost(driver, "a", "b")
        with Peer(path, context) as peer:
            driver.do("connect", timeout_s=10)
            peer.welcome(epoch="second")
            assert driver.expect("connected")["welcome"]["epoch"] == "second"
            peer.serves(driver)


def test_what_came_before_a_loss_is_read(driver: Driver, peer: Peer) -> None:
    peer.greet(driver)
    request = peer.start(driver, "a")
    peer.start(driver, "b")
    peer.say(t="accepted", id=request, prompt_tokens=9)
    # As many as ZeroMQ reads ahead of its program, and slower to decode than to receive.
    tokens = [70_000] * 500
    for seq in range(900):
        peer.say(t="delta", id=request, seq=seq, text="x", tokens=tokens)
    peer.say(id=request, **done())
    peer.leave()
    answered = driver.answered("a")
    assert (answered.end["event"], len(answered.joined())) == ("done", 900)
    lost(driver, "b")


def test_close_ends_what_is_open(driver: Driver, peer: Peer) -> None:
    peer.greet(driver)
    request = peer.start(driver, "a")
    peer.say(t="accepted", id=request, prompt_tokens=9)
    peer.say(t="delta", id=request, seq=0, text="x", tokens=[1])
    driver.expect("delta", "a")
    driver.generate("b", prompt="y", read=False)
    peer.take("generate")
    driver.do("tokenize", "c", request={"text": "z"})
    peer.take("tokenize")
    driver.do("close")
    peer.take("bye")
    told = {one.get("as"): one for one in driver.end_input()}
    for name in "ac":
        assert (told[name]["event"], told[name]["code"]) == ("failed", "client_closed")
    assert told[None] == {"event": "closed"}


def test_close_without_a_session(driver: Driver) -> None:
    assert [one["event"] for one in driver.close()] == ["closed"]


@pytest.mark.parametrize("phase", ["before accepted", "queued", "in the stream"])
def test_cancel_is_sent_and_done_ends_it(driver: Driver, peer: Peer, phase: str) -> None:
    peer.greet(driver)
    request = peer.start(driver, "a")
    if phase != "before accepted":
        peer.say(t="accepted", id=request, prompt_tokens=9)
    if phase == "in the stream":
        peer.say(t="delta", id=request, seq=0, text="so ", tokens=[1])
        driver.expect("delta", "a")
    driver.do("cancel", "a")
    assert peer.take("cancel") == {"t": "cancel", "id": request}
    # What was on its way still comes.
    seq = int(phase == "in the stream")
    peer.say(t="delta", id=request, seq=seq, text="far", tokens=[2])
    peer.say(id=request, **done(reason="cancelled"))
    end = driver.answered("a").end
    assert (end["event"], end["reason"]) == ("done", "cancelled")
    peer.serves(driver)


def test_cancel_after_the_end_sends_nothing(driver: Driver, peer: Peer) -> None:
    peer.greet(driver)
    peer.finish(peer.start(driver, "a"), "x")
    assert driver.answered("a").end["reason"] == "stop"
    driver.do("cancel", "a")
    peer.serves(driver)


def test_a_failure_may_answer_a_cancel(driver: Driver, peer: Peer) -> None:
    peer.greet(driver)
    request = peer.start(driver, "a")
    driver.do("cancel", "a")
    peer.take("cancel")
    peer.say(t="error", id=request, code="executor_failed", message="It died.")
    assert failed(driver, "a") == ("executor_failed", "service")


def test_ids_are_not_used_again(driver: Driver, peer: Peer) -> None:
    peer.greet(driver)
    ids = []
    for name in ("a", "b", "c"):
        ids.append(peer.start(driver, name))
        peer.finish(ids[-1], "x")
        driver.answered(name)
    assert len(set(ids)) == 3
    assert all(0 < len(one) <= 64 for one in ids)


@pytest.mark.parametrize("fields", [{}, {"id": ""}])
def test_an_error_without_id_leaves_nothing_open_for_ever(
    driver: Driver, peer: Peer, fields: dict[str, str]
) -> None:
    peer.greet(driver)
    request, other = peer.start(driver, "a"), peer.start(driver, "b")
    peer.say(t="error", code="message_too_large", message="Too much.", **fields)
    peer.finish(other, "x")
    end = driver.answered("b").end
    driver.generate("c", prompt="y")
    if end["event"] == "failed":  # It takes everything open for what was meant.
        assert [end["code"], driver.answered("a").end["code"]] == ["message_too_large"] * 2
        peer.left = True
        peer.welcome()
    peer.finish(peer.take("generate")["id"], "y")
    assert driver.answered("c").joined() == "y"
    if end["event"] == "done":  # It knows that "a" was not meant, and all goes on.
        peer.finish(request, "x")
        assert driver.answered("a").end["event"] == "done"
