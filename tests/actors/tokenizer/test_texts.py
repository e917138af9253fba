"""Conversion of long texts in a worker thread, and the text of a stream of tokens."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import anyio.to_thread
import pytest
from structlog.testing import capture_logs

from hearth.actors.messages import Cancel, ChatTurn, Convert, Converted, Failed, Request, RowDelta
from hearth.actors.tokenizer import actor as module
from hearth.actors.tokenizer.actor import TextStreams, failed_with, joined
from hearth.runtime.errors import HearthError
from hearth.runtime.request import FinishReason, RequestOptions, RowToken, TopLogprob
from hearth.runtime.text import Tokenizer
from tests.actors.tokenizer.test_actor import harness, prepare
from tests.runtime.text.folders import byte_level, open_tokenizer

T = TypeVar("T")
LONG = "x" * 20000
BULK: list[dict[str, Any]] = [
    {"text": LONG},
    {"turns": [ChatTurn("user", LONG[:10000])] * 2},
    {"tokens": [65] * 20000},
]


class Slow:
    """A tokenizer whose long works wait for `go`."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.go = threading.Event()
        self.started = threading.Event()
        self.encoded = 0

    def encode(self, text: str, field: str) -> list[int]:
        return self._after(len(text), self.inner.encode(text[:8], field))

    def encode_chat(self, turns: list[tuple[str, str]]) -> list[int]:
        return self._after(sum(len(text) for _, text in turns), [1])

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        return self._after(len(ids), self.inner.decode(ids[:8], skip_special=skip_special))

    def _after(self, size: int, result: T) -> T:
        self.encoded += 1
        self.started.set()
        if size > 10000:
            self.go.wait(5)
        return result


@pytest.fixture
def slow(tmp_path_factory: pytest.TempPathFactory) -> Slow:
    return Slow(open_tokenizer(tmp_path_factory.mktemp("engine"), byte_level()))


@pytest.mark.parametrize("work", BULK)
async def test_nobody_waits_for_the_very_long_texts_of_others(
    slow: Slow, work: dict[str, Any]
) -> None:
    async with harness(slow) as made:
        for rid in (1, 2):
            made.mail.post(Convert(rid, **work))
        made.mail.post(prepare(3))
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        assert submit.rid == 3
        assert made.door.receive_nowait() is None
        slow.go.set()
        answers = [await made.door.receive() for _ in range(2)]
        assert [(type(one), getattr(one, "rid", 0)) for one in answers] == [
            (Converted, 1),
            (Converted, 2),
        ]


async def test_what_is_cancelled_before_its_turn_is_never_encoded(slow: Slow) -> None:
    async with harness(slow) as made:
        made.mail.post(prepare(1, LONG))
        assert await anyio.to_thread.run_sync(slow.started.wait, 5)
        for message in (prepare(2, LONG), prepare(3, LONG), Cancel(1), Cancel(2), prepare(4)):
            made.mail.post(message)
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        assert submit.rid == 4
        slow.go.set()
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        assert submit.rid == 3
        assert slow.encoded == 3, "the short one, the one that was being encoded, and the last"


async def test_very_long_texts_have_a_bound_of_their_own(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BULK_LIMIT", 2)
    async with harness(slow) as made:
        for rid in (1, 2, 3, 4):
            made.mail.post(prepare(rid, LONG))
        failed = await made.door.receive()
        assert isinstance(failed, Failed)
        assert (failed.rids, failed.code) == ([4], "queue_full")
        slow.go.set()
        for rid in (1, 2, 3):
            submit = await made.scheduler.receive()
            assert isinstance(submit, Request)
            assert submit.rid == rid


async def test_clients_take_turns_and_one_that_fills_the_lane_gives_way(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BULK_LIMIT", 3)
    async with harness(slow) as made:
        for rid in (1, 2, 3, 4):
            made.mail.post(Convert(rid, text=LONG, client=1))
        for rid in (5, 6, 7):
            made.mail.post(Convert(rid, text=LONG, client=2))
        refused = [await made.door.receive() for _ in range(3)]
        assert [(*one.rids, one.code) for one in refused if isinstance(one, Failed)] == [
            (4, "queue_full"),
            (3, "queue_full"),
            (7, "queue_full"),
        ]
        slow.go.set()
        answers = [await made.door.receive() for _ in range(4)]
        assert [one.rid for one in answers if isinstance(one, Converted)] == [1, 5, 2, 6]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(tmp_path_factory.mktemp("engine"), byte_level())


def request(rid: int, *stop: str) -> Request:
    return Request(rid, RequestOptions(stop=stop))


def feed(
    streams: TextStreams, rid: int, ids: list[int], finish: FinishReason | None = None
) -> list[RowDelta | Failed | None]:
    last = len(ids) - 1
    return [
        streams.take(RowToken(rid, number, finish=finish if n == last else None))
        for n, number in enumerate(ids)
    ]


def text_of(answers: list[RowDelta | Failed | None]) -> str:
    assert all(isinstance(answer, RowDelta) for answer in answers)
    return "".join(answer.text for answer in answers if isinstance(answer, RowDelta))


def test_a_text_that_is_cut_ends_with_what_it_has(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    streams.open(request(1, "lamp shade"))
    assert text_of(feed(streams, 1, tokenizer.encode("a lamp"))) == "a "
    assert streams.cut(1) == RowDelta(1, "lamp", [], finish="length")
    assert streams.cut(1) is None


def test_each_request_has_a_text_of_its_own(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    streams.open(request(1))
    streams.open(request(2))
    fox, lamp = tokenizer.encode("🦊"), tokenizer.encode("lamp")
    assert text_of(feed(streams, 1, fox[:2])) == ""
    assert text_of(feed(streams, 2, lamp)) == "lamp"
    assert text_of(feed(streams, 1, fox[2:])) == "🦊"


def test_the_last_token_flushes_and_forgets(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    streams.open(request(1, "kitchen"))
    answers = feed(streams, 1, tokenizer.encode("the kit"), "length")
    assert text_of(answers) == "the kit"
    assert isinstance(answers[-1], RowDelta)
    assert answers[-1].finish == "length"
    assert len(streams) == 0
    assert feed(streams, 1, [5]) == [None]


def test_a_stop_string_ends_the_request_and_does_not_leak(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    streams.open(request(1, "kitchen"))
    answers = feed(streams, 1, tokenizer.encode("in the kitchen"))
    assert text_of(answers) == "in the "
    assert isinstance(answers[-1], RowDelta)
    assert answers[-1].finish == "stop"
    assert answers[-1].tokens != []
    assert len(streams) == 0


def test_a_stop_string_beats_the_length_limit(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    streams.open(request(1, "lamp"))
    (*_, last) = feed(streams, 1, tokenizer.encode("the lamp"), "length")
    assert isinstance(last, RowDelta)
    assert last.finish == "stop"


def test_an_end_token_is_no_text_even_with_a_spelling(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    streams.open(request(1))
    answers = feed(streams, 1, tokenizer.encode("ab<think>"), "stop")
    assert text_of(answers) == "ab"


def test_logprobs_are_passed_on_where_they_were_asked_for(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    streams.open(request(1))
    token = RowToken(1, 5, -0.5, (TopLogprob(5, -0.5),))
    answer = streams.take(token)
    assert isinstance(answer, RowDelta)
    assert answer.logprobs == [token]
    plain = streams.take(RowToken(1, 5))
    assert isinstance(plain, RowDelta)
    assert plain.logprobs == []


def test_a_failed_token_fails_its_request(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    streams.open(request(1))
    answer = streams.take(RowToken(1, -1, error="non_finite"))
    assert answer == failed_with(1, "non_finite")
    assert "finite" in failed_with(1, "non_finite").message
    assert len(streams) == 0


def test_a_token_outside_the_vocabulary_is_an_error_of_its_row_alone(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    streams.open(request(1))
    streams.open(request(2))
    with capture_logs() as logs:
        answer = streams.take(RowToken(1, -7))
    assert answer == failed_with(1, "internal")
    assert [entry["rid"] for entry in logs] == [1]
    assert len(streams) == 1


def test_unknown_requests_are_ignored(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    streams.drop(9)
    assert streams.take(RowToken(9, 5)) is None


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    with pytest.raises(HearthError, match="stop"):
        streams.open(request(1, ""))
    assert len(streams) == 0


def test_two_deltas_join_in_order_and_the_second_says_how_it_ended() -> None:
    one, two = RowToken(0, 5, -0.5), RowToken(0, 6, -1.5)
    whole = joined(RowDelta(1, "a", [5], [one]), RowDelta(1, "b", [6], [two], "stop"))
    assert whole == RowDelta(1, "ab", [5, 6], [one, two], "stop")
