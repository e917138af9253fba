"""Answers of a scripted ROUTER: those that a client passes on, tolerates, and refuses."""

import re
from typing import Any

import msgspec
import pytest

from clients.conformance.conftest import CLIENTS
from clients.conformance.driving import Driver
from clients.conformance.scripted import USAGE, Peer, done, packed, welcome

SERVICE = {
    "queue_full",
    "too_many_clients",
    "too_many_requests",
    "deadline_exceeded",
    "slow_client",
    "lease_expired",
    "shutting_down",
    "executor_failed",
    "encoder_failed",
    "weights_invalid",
    "cancelled_by_operator",
    "non_finite",
    "out_of_memory",
    "internal",
}
CONNECTION = {"unsupported_protocol", "not_allowed"}
OF_THE_SESSION = {"hello_required", "lease_expired"}
"""Codes by which the session ends, which have scenes of their own."""


def documented_codes() -> list[str]:
    """Codes of the table in PROTOCOL.md."""
    text = (CLIENTS / "PROTOCOL.md").read_text(encoding="utf-8")
    table = text.split("## Error codes")[1].split("## Versions")[0]
    return re.findall(r"^\| `(\w+)`", table, re.MULTILINE)


@pytest.fixture
def driver(driver: Driver, peer: Peer) -> Driver:
    """A driver that is connected to the scripted ROUTER."""
    peer.greet(driver)
    return driver


def violated(driver: Driver, name: str) -> None:
    """Check that a request has ended by an answer that is not allowed."""
    end = driver.answered(name).end
    assert (end["event"], end.get("code"), end.get("kind")) == (
        "failed",
        "protocol_violation",
        "connection",
    ), end


def test_every_code_is_passed_on_with_its_kind(driver: Driver, peer: Peer) -> None:
    codes = [one for one in documented_codes() if one not in OF_THE_SESSION]
    assert len(codes) > 30
    for code in codes:
        fields = {"field": "messages[0].role"} if code not in SERVICE | CONNECTION else {}
        request = peer.start(driver, code)
        peer.say(t="error", id=request, code=code, message=f"It is {code}.", **fields)
    told = {}
    for code in codes:
        end = driver.answered(code).end
        assert (end["event"], end["message"]) == ("failed", f"It is {code}."), end
        assert end.get("field", "") == ("" if code in SERVICE | CONNECTION else "messages[0].role")
        told[code] = (end["code"], end["kind"])
    kinds = dict.fromkeys(SERVICE, "service") | dict.fromkeys(CONNECTION, "connection")
    assert told == {code: (code, kinds.get(code, "request")) for code in codes}
    peer.serves(driver)


def test_an_unknown_code_is_an_error_of_the_service(driver: Driver, peer: Peer) -> None:
    request = peer.start(driver, "a")
    peer.say(t="error", id=request, code="brand_new", message="Something else.", field="x.y")
    end = driver.answered("a").end
    assert (end["code"], end["kind"], end["field"]) == ("brand_new", "service", "x.y")
    peer.serves(driver)


def test_a_failure_has_its_usage_and_says_when_to_come_again(driver: Driver, peer: Peer) -> None:
    request = peer.start(driver, "a")
    peer.say(t="accepted", id=request, prompt_tokens=9)
    peer.say(t="delta", id=request, seq=0, text="so far", tokens=[1, 2])
    peer.say(
        t="error", id=request, code="shutting_down", message="Later.", usage=USAGE, retry_after_s=3
    )
    answered = driver.answered("a")
    assert answered.joined() == "so far"
    assert answered.end["usage"]["completion_tokens"] == 2
    assert answered.end["retry_after_s"] == 3
    request = peer.start(driver, "b")
    peer.say(t="error", id=request, code="queue_full", message="Later.", retry_after_s=0.25)
    assert driver.answered("b").end["retry_after_s"] == 0.25


UNKNOWN: dict[str, Any] = {
    "whole": 2**63,
    "map": {"a": [1, {"b": None}], 3: "number as a key", "bytes": b"\x00\xff"},
    "nil": None,
    "true": True,
    "extension": 1.5,
    "long": "x" * 70_000,
    "__proto__": {"text": 5},
    "constructor": 6,
    "time": msgspec.msgpack.Ext(-1, b"of another size"),
}


def test_unknown_fields_are_ignored(driver: Driver, peer: Peer) -> None:
    request = peer.start(driver, "a")
    peer.say(t="accepted", id=request, prompt_tokens=9, **UNKNOWN)
    one = {"logprob": -0.5, "top": [[1, -0.5]], "new": UNKNOWN}
    call = {"index": 0, "id": "c", "name": "f", "arguments": "{}", "new": UNKNOWN}
    peer.say(
        t="delta",
        id=request,
        seq=0,
        text="a",
        tokens=[1],
        logprobs=[one],
        tool_calls=[call],
        **UNKNOWN,
    )
    peer.say(id=request, **done(usage={**USAGE, "new": UNKNOWN}, **UNKNOWN))
    answered = driver.answered("a")
    assert answered.joined() == "a"
    assert answered.tool_calls() == [{"id": "c", "name": "f", "arguments": {}}]
    assert answered.logprobs()[0]["logprob"] == -0.5
    assert answered.end["usage"]["completion_tokens"] == 2
    driver.do("status", "s")
    peer.say(
        t="status_report",
        id=peer.take("status")["id"],
        server="x",
        model="m",
        uptime_s=1,
        state="dancing",
        clients=1,
        running=0,
        queued=0,
        queued_tokens=0,
        stage="polishing",
        **UNKNOWN,
    )
    told = driver.answered("s").end
    assert (told["state"], told["stage"]) == ("dancing", "polishing")
    request = peer.start(driver, "e")
    peer.say(t="error", id=request, code="internal", message="No.", usage=USAGE, **UNKNOWN)
    assert driver.answered("e").end["code"] == "internal"


def test_an_unknown_reason_is_kept(driver: Driver, peer: Peer) -> None:
    request = peer.start(driver, "a")
    choices = [{"reason": "rain", "completion_tokens": 1}]
    peer.say(id=request, **done(reason="snow", choices=choices))
    end = driver.answered("a").end
    assert end["reason"] == "snow"
    assert end["choices"][0]["reason"] == "rain"


def test_answers_of_a_later_kind_are_ignored(driver: Driver, peer: Peer) -> None:
    request = peer.start(driver, "a")
    peer.say(t="progress", id=request, share=0.5, new=UNKNOWN)
    peer.say(t="weather")
    peer.say(t="delta2", id=request, seq="x", text=7)
    peer.finish(request, "fi", "ne")
    answered = driver.answered("a")
    assert (answered.end["event"], answered.joined()) == ("done", "fine")


def test_everything_of_a_delta_and_of_done_is_told(driver: Driver, peer: Peer) -> None:
    request = peer.start(driver, "a")
    peer.say(t="accepted", id=request, prompt_tokens=9, request="whole-1")
    logprobs = [
        {
            "logprob": -1,
            "top": [[4, -1], [5, -2.5]],
            "token_bytes": b"\xf0\x9f",
            "top_bytes": [b"\xf0\x9f", b""],
        }
    ]
    pieces = [
        {"index": 0, "id": "c0", "name": "f", "arguments": '{"a":'},
        {"index": 1, "id": "c1", "name": "g", "arguments": '{"deep":{"b":[1,{"c":null}]}}'},
    ]
    first = {"reasoning": "Hm.", "ended": 12.5, "logprobs": logprobs, "tool_calls": pieces}
    peer.say(t="delta", id=request, seq=0, text="", tokens=[4], **first)
    more = [{"index": 0, "arguments": "1}"}]
    peer.say(t="delta", id=request, seq=1, text="x", tool_calls=more, ended=13)
    peer.say(t="delta", id=request, seq=2, text="🙂", tokens=[5, 6], choice=1)
    times = {"queue_ms": 0.5, "prefill_ms": 2, "decode_ms": 7.25}
    usage = {**USAGE, "reasoning_tokens": 1, "cached_tokens": 3, **times}
    images = {"count": 1, "tokens": 64, "sizes": [[32, 48]], "decode_ms": 1.5}
    speculation = {"rounds": 2, "drafted": 12, "accepted": 9, "accept_length": 4.5}
    choices = [
        {"reason": "stop", "completion_tokens": 1, "stop": "."},
        {"reason": "length", "completion_tokens": 2},
    ]
    end = {"stop": ".", "choices": choices, "images": images, "speculation": speculation}
    peer.say(id=request, **done(usage=usage, **end))
    answered = driver.answered("a")
    assert answered.events[0] == {"event": "accepted", "as": "a", "prompt_tokens": 9} | {
        key: value for key, value in answered.events[0].items() if key == "request"
    }
    assert answered.joined("reasoning") == "Hm."
    assert [one.get("ended") for one in answered.deltas[:2]] == [12.5, 13]
    assert (answered.joined(), answered.joined(choice=1)) == ("x", "🙂")
    assert (answered.tokens(), answered.tokens(choice=1)) == ([4], [5, 6])
    (told,) = answered.logprobs()
    assert (told["logprob"], told["top"]) == (-1, [[4, -1], [5, -2.5]])
    assert (told["token_bytes"], told["top_bytes"]) == ("8J8=", ["8J8=", ""])
    assert answered.tool_calls() == [
        {"id": "c0", "name": "f", "arguments": {"a": 1}},
        {"id": "c1", "name": "g", "arguments": {"deep": {"b": [1, {"c": None}]}}},
    ]
    assert answered.end["usage"] == usage
    assert answered.end["stop"] == "."
    assert answered.end["speculation"] == speculation
    assert images.items() <= answered.end["images"].items()
    ends = [{**one, "stop": one.get("stop", "")} for one in answered.end["choices"]]
    assert ends == [{**one, "stop": one.get("stop", "")} for one in choices]


@pytest.mark.parametrize("seqs", [[1], [0, 2], [0, 0], [0, 1, 0], [-1], [2**40]])
def test_a_seq_that_is_not_the_next_ends_its_request_alone(
    driver: Driver, peer: Peer, seqs: list[int]
) -> None:
    request = peer.start(driver, "a")
    other = peer.start(driver, "b")
    peer.say(t="accepted", id=request, prompt_tokens=9)
    peer.say(t="delta", id=other, seq=0, text="who", tokens=[1])
    peer.broken.add(request)
    for seq in seqs:
        peer.say(t="delta", id=request, seq=seq, text="x", tokens=[1])
    peer.say(t="delta", id=other, seq=1, text="le", tokens=[2])
    peer.say(id=request, **done())
    peer.say(id=other, **done())
    answered = driver.answered("b")
    assert (answered.end["event"], answered.joined()) == ("done", "whole")
    violated(driver, "a")
    peer.serves(driver)
    assert driver.unread("a") == []


LATER = {
    "done": done(),
    "error": {"t": "error", "code": "internal", "message": "Late."},
    "delta": {"t": "delta", "seq": 1, "text": "late", "tokens": [3]},
    "accepted": {"t": "accepted", "prompt_tokens": 9},
    "tokens": {"t": "tokens", "tokens": [1]},
}


@pytest.mark.parametrize("end", ["done", "error"])
@pytest.mark.parametrize("later", LATER)
def test_nothing_follows_the_first_terminal_answer(
    driver: Driver, peer: Peer, end: str, later: str
) -> None:
    request = peer.start(driver, "a")
    peer.say(t="accepted", id=request, prompt_tokens=9)
    peer.say(t="delta", id=request, seq=0, text="x", tokens=[1])
    peer.say(id=request, **LATER[end])
    peer.say(id=request, **LATER[later])
    peer.serves(driver)
    answered = driver.answered("a")
    assert answered.joined() == "x"
    assert answered.end["event"] == ("done" if end == "done" else "failed")
    assert driver.unread("a") == []
    assert [one["event"] for one in driver.close()] == ["closed"]


def test_answers_for_unknown_ids_are_ignored(driver: Driver, peer: Peer) -> None:
    request = peer.start(driver, "a")
    for answer in LATER.values():
        peer.say(id="nobody", **answer)
    peer.say(t="delta", id="", seq=0, text="x")
    peer.say(
        t="status_report",
        id="nobody",
        server="x",
        model="m",
        uptime_s=1.0,
        state="ready",
        clients=1,
        running=0,
        queued=0,
        queued_tokens=0,
    )
    peer.finish(request, "mine")
    answered = driver.answered("a")
    assert (answered.end["event"], answered.joined()) == ("done", "mine")


def test_an_answer_of_the_wrong_kind_ends_its_request(driver: Driver, peer: Peer) -> None:
    driver.do("tokenize", "t", request={"text": "x"})
    peer.say(t="text", id=peer.take("tokenize")["id"], text="not tokens")
    violated(driver, "t")
    for name in ("delta", "accepted"):
        driver.do("tokenize", name, request={"text": "x"})
        peer.say(id=peer.take("tokenize")["id"], **{**LATER[name], "seq": 0})
        violated(driver, name)
    request = peer.start(driver, "g")
    peer.broken.add(request)
    peer.say(t="tokens", id=request, tokens=[1])
    violated(driver, "g")
    peer.serves(driver)


def test_the_first_accepted_counts(driver: Driver, peer: Peer) -> None:
    driver.generate("a", prompt="x", read=False)
    request = peer.take("generate")["id"]
    for tokens in (9, 10, 11):
        peer.say(t="accepted", id=request, prompt_tokens=tokens)
    peer.say(t="delta", id=request, seq=0, text="x", tokens=[1])
    peer.say(t="accepted", id=request, prompt_tokens=12)
    peer.say(id=request, **done())
    driver.do("read", "a")
    events = driver.answered("a").events
    told = [one["prompt_tokens"] for one in events if one["event"] == "accepted"]
    assert told in ([9], [])  # A driver may tell of it only before it reads a delta.
    assert events[-1]["event"] == "done"


UNREADABLE = {
    "no msgpack": b"\xc1\xc1\xc1",
    "empty": b"",
    "no map": b"\x93\x01\x02\x03",
    "text": b"hello",
    "no t": packed({"id": "1"}),
    "t is a number": packed({"t": 5, "id": "1"}),
    "cut": packed({"t": "done", "id": "1", "reason": "stop"})[:-3],
    "cut map": b"\xdf\xff\xff\xff\xff",
    "text too long": b"\x81\xa1t\xdb\xff\xff\xff\xffx",
    "list too long": b"\x82\xa1t\xa5delta\xa6tokens\xdd\xff\xff\xff\xff",
    "nested too deep": b"\x82\xa1t\xa5delta\xa1x" + b"\x91" * 100_000 + b"\x01",
    "no utf-8": b"\x83\xa1t\xa5delta\xa2id\xa11\xa4text\xa2\xff\xfe",
    "delta without seq": packed({"t": "delta", "id": "1", "text": "x"}),
    "seq is text": packed({"t": "delta", "id": "1", "seq": "0", "text": "x"}),
    "text is a number": packed({"t": "delta", "id": "1", "seq": 0, "text": 5}),
    "done without usage": packed({"t": "done", "id": "1", "reason": "stop"}),
    "error without a code": packed({"t": "error", "id": "1", "message": "x"}),
    "more behind it": packed({"t": "leased", "seconds": 3.0}) + b"\x01",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_bytes_that_cannot_be_read_end_the_session(driver: Driver, peer: Peer, name: str) -> None:
    peer.start(driver, "a")
    peer.start(driver, "b")
    peer.send(UNREADABLE[name])
    for request in "ab":
        violated(driver, request)
    peer.greet(driver)
    peer.serves(driver)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_heads_of_any_width(driver: Driver, peer: Peer, bits: int) -> None:
    request = peer.start(driver, "a")
    logprob = {"logprob": -1, "top": [[3, -1]], "token_bytes": b"x", "top_bytes": [b"x"]}
    call = {"index": 0, "id": "c", "name": "f", "arguments": "{}"}
    delta = {"t": "delta", "id": request, "seq": 0, "text": "wi", "tokens": [3, 300]}
    for message in (
        {"t": "leased", "seconds": 30},
        {"t": "accepted", "id": request, "prompt_tokens": 9},
        {**delta, "logprobs": [logprob], "tool_calls": [call]},
        {"t": "delta", "id": request, "seq": 1, "text": "de", "choice": 0},
        {"id": request, **done()},
    ):
        peer.send(packed(message, bits))
    answered = driver.answered("a")
    assert (answered.end["event"], answered.joined()) == ("done", "wide")
    assert answered.tokens() == [3, 300]
    assert answered.end["usage"]["prompt_tokens"] == 9
    driver.do("tokenize", "t", request={"text": "x"})
    tokens = {"t": "tokens", "id": peer.take("tokenize")["id"], "tokens": [1, 2**31 - 1]}
    peer.send(packed(tokens, bits))
    assert driver.answered("t").end["tokens"] == [1, 2**31 - 1]


def test_a_number_may_be_an_integer(driver: Driver, peer: Peer) -> None:
    request = peer.start(driver, "a")
    usage = {**USAGE, "queue_ms": 3, "prefill_ms": 2**40, "decode_ms": 0}
    speculation = {"rounds": 1, "drafted": 6, "accepted": 2, "accept_length": 2}
    peer.say(t="delta", id=request, seq=0, text="", tokens=[1], ended=5, logprobs=[{"logprob": 0}])
    peer.say(id=request, **done(usage=usage, speculation=speculation))
    answered = driver.answered("a")
    assert answered.deltas[0]["ended"] == 5
    assert answered.end["usage"]["queue_ms"] == 3
    assert answered.end["speculation"]["accept_length"] == 2


def test_an_answer_of_8_mib(driver: Driver, peer: Peer) -> None:
    request = peer.start(driver, "a")
    text = "0123456789abcdef" * (1 << 19)
    message = {"t": "delta", "id": request, "seq": 0, "text": text[: (8 << 20) - 100]}
    peer.send(packed(message))
    peer.say(id=request, **done())
    answered = driver.answered("a")
    assert len(answered.joined()) == (8 << 20) - 100
    peer.serves(driver)


def test_an_unasked_leased_is_fine(driver: Driver, peer: Peer) -> None:
    request = peer.start(driver, "a")
    for seconds in (30, 12.5):
        peer.say(t="leased", seconds=seconds)
    peer.finish(request, "ok")
    assert driver.answered("a").joined() == "ok"


def test_frames_behind_an_answer_are_no_harm(driver: Driver, peer: Peer) -> None:
    request = peer.start(driver, "a")
    peer.send(packed({"t": "delta", "id": request, "seq": 0, "text": "x"}), b"more", b"")
    peer.say(id=request, **done())
    assert driver.answered("a").joined() == "x"


def test_a_welcome_within_a_session_renews_its_limits(driver: Driver, peer: Peer) -> None:
    request = peer.start(driver, "a")
    peer.say(**welcome())
    peer.finish(request, "on")
    assert driver.answered("a").joined() == "on"
