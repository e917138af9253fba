"""The text of a stream of tokens."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from hearth.actors.messages import Failed, Request, RowDelta
from hearth.actors.tokenizer.text_streams import TextStreams, failed_with, joined
from hearth.runtime.errors import HearthError
from hearth.runtime.request import FinishReason, RequestOptions, RowToken, TopLogprob
from hearth.runtime.text.conversation import Conversation, Tool, Turn
from hearth.runtime.text.tokenizer import Tokenizer
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
        streams.take(RowToken(rid, number, finish=finish if n == last else None))
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
    token = RowToken(1, 5, -0.5, (TopLogprob(5, -0.5),))
    answer = streams.take(token)
    assert isinstance(answer, RowDelta)
    assert answer.logprobs == [token]
    plain = streams.take(RowToken(1, 5))
    assert isinstance(plain, RowDelta)
    assert plain.logprobs == []


def test_a_failed_token_fails_its_request(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1))
    answer = streams.take(RowToken(1, -1, error="non_finite"))
    assert answer == failed_with(1, "non_finite")
    assert "finite" in failed_with(1, "non_finite").message
    assert len(streams) == 0


def test_a_token_outside_the_vocabulary_is_an_error_of_its_row_alone(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1))
    streams.open(request(2))
    with capture_logs() as logs:
        answer = streams.take(RowToken(1, -7))
    assert answer == failed_with(1, "internal")
    assert [entry["rid"] for entry in logs] == [1]
    assert len(streams) == 1


TOOLS = [Tool("f", parameters={"type": "object"})]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>hm</think>"


def chat(features: list[str], **fields: Any) -> Request:
    conversation = Conversation([Turn("user", "hi")], TOOLS, **fields)
    return Request(1, chat=conversation, features=features)


def replied(tokenizer: Tokenizer, request: Request, text: str) -> list[RowDelta]:
    """The deltas of a reply of this text and an end token, up to the one that ends it."""
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request)
    answers = feed(streams, 1, [*tokenizer.encode(text), *ENDS], "stop")
    return [one for one in answers if isinstance(one, RowDelta)]


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("engine")
    open_tokenizer(folder, byte_level())
    return Tokenizer.open(folder, "hermes")


@pytest.mark.parametrize(
    ("features", "text", "reasoning", "calls"),
    [
        (["reasoning", "tool_calls"], "ok", "hm", ["f"]),
        (["tool_calls"], f"{THOUGHT}ok", "", ["f"]),
        (["reasoning"], f"ok{CALL}", "hm", []),
        ([], f"{THOUGHT}ok{CALL}", "", []),
    ],
)
def test_a_client_reads_what_it_has_named(
    hermes: Tokenizer, features: list[str], text: str, reasoning: str, calls: list[str]
) -> None:
    deltas = replied(hermes, chat(features), f"{THOUGHT}ok{CALL}")
    assert "".join(one.text for one in deltas) == text
    assert "".join(one.reasoning for one in deltas) == reasoning
    # With the marks around it.
    counted = sum(one.reasoning_tokens for one in deltas)
    assert counted == (len(hermes.encode(THOUGHT)) if reasoning else 0)
    assert [call.name for one in deltas for call in one.calls if call.name] == calls
    assert deltas[-1].finish == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize(
    ("changes", "calls"),
    [({}, 2), ({"parallel_tool_calls": False}, 1), ({"tool_choice": "=f"}, 1)],
)
def test_a_turn_that_may_have_one_call_ends_behind_it(
    hermes: Tokenizer, changes: dict[str, Any], calls: int
) -> None:
    deltas = replied(hermes, chat(["tool_calls"], **changes), CALL * 2)
    assert len([call for one in deltas for call in one.calls if call.name]) == calls
    assert deltas[-1].finish == "tool_calls"


def test_calls_before_a_stop_string_are_the_reason(hermes: Tokenizer) -> None:
    asked = replace(chat(["tool_calls"]), options=RequestOptions(stop=("bye",)))
    last = replied(hermes, asked, f"{CALL} good bye")[-1]
    assert (last.finish, last.stop_string) == ("tool_calls", "bye")


def test_tools_that_must_not_be_called_are_not(hermes: Tokenizer) -> None:
    deltas = replied(hermes, chat(["tool_calls"], tool_choice="none"), CALL)
    assert "".join(one.text for one in deltas) == CALL
    assert deltas[-1].finish == "stop"


def test_the_last_token_of_a_grammar_is_text(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1))
    answers = feed(streams, 1, tokenizer.encode("on"), "stop")
    assert text_of(answers) == "on"


def test_the_stop_string_that_matched_is_told(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.open(request(1, "x", "lamp"))
    last = [one for one in feed(streams, 1, tokenizer.encode("the lamp")) if one is not None][-1]
    assert isinstance(last, RowDelta)
    assert last.stop_string == "lamp"


def test_tokens_are_spelt_in_bytes_for_clients_that_read_them(tokenizer: Tokenizer) -> None:
    (first, *_) = tokenizer.encode("🦊")
    a, b = tokenizer.encode("ab")
    token = RowToken(1, first, -0.5, (TopLogprob(first, -0.5), TopLogprob(a, -1.0)))
    for features, spellings in ((["token_bytes"], [[b"\xf0\x9f", b"\xf0\x9f", b"a"]]), ([], [])):
        streams = TextStreams(tokenizer, ENDS)
        streams.open(Request(1, prompt="x", features=features))
        delta = streams.take(token)
        assert isinstance(delta, RowDelta)
        assert delta.spellings == spellings
        more = streams.take(RowToken(1, b))
        assert isinstance(more, RowDelta)
        assert joined(delta, more).spellings == spellings


def test_unknown_requests_are_ignored(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    streams.drop(9)
    assert streams.take(RowToken(9, 5)) is None


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer, ENDS)
    with pytest.raises(HearthError, match="stop"):
        streams.open(request(1, ""))
    assert len(streams) == 0


def test_two_deltas_join_in_order_and_the_second_says_how_it_ended() -> None:
    one, two = RowToken(0, 5, -0.5), RowToken(0, 6, -1.5)
    whole = joined(RowDelta(1, "a", [5], [one]), RowDelta(1, "b", [6], [two], "stop"))
    assert whole == RowDelta(1, "ab", [5, 6], [one, two], "stop")
