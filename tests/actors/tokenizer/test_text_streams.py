"""The text of a stream of tokens."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from hearth.actors.messages import Failed, Request, RowDelta
from hearth.actors.tokenizer.text_streams import TextStreams, failed_with, joined
from hearth.runtime.errors import HearthError
from hearth.runtime.request import FinishReason, RequestOptions, RowToken, TopLogprob
from hearth.runtime.text import Tokenizer
from tests.runtime.text.folders import byte_level, open_tokenizer

ENDS = (310,)


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
        streams.take(rid, RowToken(0, number, finish=finish if n == last else None))
        for n, number in enumerate(ids)
    ]


def text_of(answers: list[RowDelta | Failed | None]) -> str:
    assert all(isinstance(answer, RowDelta) for answer in answers)
    return "".join(answer.text for answer in answers if isinstance(answer, RowDelta))


def test_a_text_that_is_cut_ends_with_what_it_has(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1, "lamp shade"))
    assert text_of(feed(streams, 1, tokenizer.encode("a lamp"))) == "a "
    assert streams.cut(1) == RowDelta(1, "lamp", [], finish="length")
    assert streams.cut(1) is None


def test_each_request_has_a_text_of_its_own(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1))
    streams.open(request(2))
    fox, lamp = tokenizer.encode("🦊"), tokenizer.encode("lamp")
    assert text_of(feed(streams, 1, fox[:2])) == ""
    assert text_of(feed(streams, 2, lamp)) == "lamp"
    assert text_of(feed(streams, 1, fox[2:])) == "🦊"


def test_the_last_token_flushes_and_forgets(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1, "kitchen"))
    answers = feed(streams, 1, tokenizer.encode("the kit"), "length")
    assert text_of(answers) == "the kit"
    assert isinstance(answers[-1], RowDelta)
    assert answers[-1].finish == "length"
    assert len(streams) == 0
    assert feed(streams, 1, [5]) == [None]


def test_a_stop_string_ends_the_request_and_does_not_leak(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1, "kitchen"))
    answers = feed(streams, 1, tokenizer.encode("in the kitchen"))
    assert text_of(answers) == "in the "
    assert isinstance(answers[-1], RowDelta)
    assert answers[-1].finish == "stop"
    assert answers[-1].tokens != []
    assert len(streams) == 0


def test_a_stop_string_beats_the_length_limit(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1, "lamp"))
    (*_, last) = feed(streams, 1, tokenizer.encode("the lamp"), "length")
    assert isinstance(last, RowDelta)
    assert last.finish == "stop"


def test_an_end_token_is_no_text_even_with_a_spelling(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1))
    answers = feed(streams, 1, tokenizer.encode("ab<think>"), "stop")
    assert text_of(answers) == "ab"


def test_logprobs_are_passed_on_where_they_were_asked_for(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1))
    token = RowToken(0, 5, -0.5, (TopLogprob(5, -0.5),))
    answer = streams.take(1, token)
    assert isinstance(answer, RowDelta)
    assert answer.logprobs == [token]
    plain = streams.take(1, RowToken(0, 5))
    assert isinstance(plain, RowDelta)
    assert plain.logprobs == []


def test_a_failed_token_fails_its_request(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1))
    answer = streams.take(1, RowToken(0, -1, error="non_finite"))
    assert answer == failed_with(1, "non_finite")
    assert "finite" in failed_with(1, "non_finite").message
    assert len(streams) == 0


def test_a_token_outside_the_vocabulary_is_an_error_of_its_row_alone(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1))
    streams.open(request(2))
    with capture_logs() as logs:
        answer = streams.take(1, RowToken(0, -7))
    assert answer == failed_with(1, "internal")
    assert [entry["rid"] for entry in logs] == [1]
    assert len(streams) == 1


def test_unknown_requests_are_ignored(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.drop(9)
    assert streams.take(9, RowToken(0, 5)) is None


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    with pytest.raises(HearthError, match="stop"):
        streams.open(request(1, ""))
    assert len(streams) == 0


def test_two_deltas_join_in_order_and_the_second_says_how_it_ended() -> None:
    one, two = RowToken(0, 5, -0.5), RowToken(0, 6, -1.5)
    whole = joined(RowDelta(1, "a", [5], [one]), RowDelta(1, "b", [6], [two], "stop"))
    assert whole == RowDelta(1, "ab", [5, 6], [one, two], "stop")
