import json
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.text.conversation import Tool
from hearth.runtime.text.reply_format import KNOWN_FORMATS, CallForm, ReplyFormat, spelled_calls
from hearth.runtime.text.reply_parser import ReplyParser, ReplyPieces, typed_json
from hearth.runtime.text.reply_reader import ReplyReader
from hearth.runtime.text.stream import TextStream
from hearth.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.folders import byte_level, open_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "on": {"type": "boolean"},
        "list": {"type": "array"},
        "map": {"type": "object"},
    },
}
TOOLS = [Tool("light", "Switches.", SCHEMA), Tool("get.time", "Tells.", SCHEMA)]
CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [("light", {"text": "a {b}, c: [d] ü", "count": 12})],
    [("get.time", {"map": {"x": [1, "y z"], "w": {"v": 2}}, "on": True, "text": "12"})],
    [("light", {"text": "true", "list": ["p", 3], "share": 0.5}), ("get.time", {"text": "q"})],
]
SPECIAL = (
    *("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", '<|"|>'),
    *("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", "<|python_tag|>"),
)
PLAIN = ("<tool_call>", "</tool_call>")
FORMS = sorted(set(KNOWN_FORMATS) - {"none"})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    library = byte_level()
    library.add_special_tokens([*SPECIAL])
    library.add_tokens([*PLAIN])
    return open_tokenizer(tmp_path_factory.mktemp("replies"), library)


class Read(NamedTuple):
    text: str
    reasoning: str
    calls: list[tuple[str, dict[str, Any]]]


def read(pieces: Sequence[ReplyPieces]) -> Read:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for call in (call for one in pieces for call in one.calls):
        names.setdefault(call.index, call.name)
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    calls = [(names[index], json.loads(arguments[index])) for index in sorted(names)]
    text = "".join(one.text for one in pieces)
    return Read(text, "".join(one.reasoning for one in pieces), calls)


def pieces_of(
    tokenizer: Tokenizer, reply: str, shape: ReplyFormat | None, **options: Any
) -> Iterator[ReplyPieces]:
    reader = ReplyReader(tokenizer, shape, **{"tools": TOOLS, **options})
    for number in tokenizer.encode_piece(reply):
        yield reader.push(number)
    yield reader.finish()


def read_reply(tokenizer: Tokenizer, reply: str, name: str, **options: Any) -> Read:
    return read([*pieces_of(tokenizer, reply, KNOWN_FORMATS[name], **options)])


def spell(shape: ReplyFormat, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    assert shape.calls is not None
    return spelled_calls(shape.calls, calls, lambda one: json.dumps(one, ensure_ascii=False))


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", FORMS)
def test_calls_are_read_back_from_their_own_spelling(
    tokenizer: Tokenizer, name: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    found = read_reply(tokenizer, spell(KNOWN_FORMATS[name], calls), name)
    assert found == Read("", "", calls)


MARKED = sorted(name for name in FORMS if KNOWN_FORMATS[name].reasoning[0])


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", MARKED)
def test_reasoning_text_and_calls_are_told_apart(
    tokenizer: Tokenizer, name: str, *, opened: bool
) -> None:
    shape = KNOWN_FORMATS[name]
    start, end = shape.reasoning
    reply = f"{'' if opened else start}\nhm, a < b\n{end}\n\nSo be it. \n{spell(shape, CALLS[0])}\n"
    found = read_reply(tokenizer, reply, name, in_reasoning=opened)
    assert found == Read("So be it.", "hm, a < b", CALLS[0])


def test_channels_are_reasoning_text_and_calls(tokenizer: Tokenizer) -> None:
    reply = (
        "<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>"
        "On it.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.light json<|message|>"
        '{"on": true}<|call|>'
    )
    assert read_reply(tokenizer, reply, "gpt-oss") == Read(
        "On it.", "hm", [("light", {"on": True})]
    )
    assert read_reply(tokenizer, reply, "gpt-oss", tools=()).reasoning == "hm"


def test_arguments_come_in_pieces_with_the_head_first(tokenizer: Tokenizer) -> None:
    reply = spell(KNOWN_FORMATS["hermes"], [("light", {"text": "the lamp in the kitchen"})])
    found = [
        call for one in pieces_of(tokenizer, reply, KNOWN_FORMATS["hermes"]) for call in one.calls
    ]
    assert (found[0].name, found[0].arguments, len(found[0].id)) == ("light", "", 9)
    assert [one.complete for one in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > 5
    assert all(one.index == 0 for one in found)


def test_an_id_of_the_model_is_kept(tokenizer: Tokenizer) -> None:
    form = CallForm("json", section=("[TOOL_CALLS][", "]"), id_key="id")
    reply = '[TOOL_CALLS][{"id": "abc123", "name": "light", "arguments": {}}]'
    found = [
        call
        for one in pieces_of(tokenizer, reply, ReplyFormat("", "probe", calls=form))
        for call in one.calls
    ]
    assert found[0].id == "abc123"


NO_CALLS = [
    'a {"name": "light"} b', "<tool_call>", "x <tool_call>\n{} y", "<tool_call>\n<tool_call>\nz",
    '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', "[TOOL_CALLS]", " \n",
    '<tool_call>\n{"name": "light", "arguments": [1]}\n</tool_call>', "</think>", "a <think> b",
    '<tool_call>\n{"name": "light", "arguments": "no"}\n</tool_call>',
]  # fmt: skip


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "mistral"])
@pytest.mark.parametrize("reply", NO_CALLS)
def test_what_is_no_call_is_text_in_full(tokenizer: Tokenizer, name: str, reply: str) -> None:
    found = read_reply(tokenizer, reply, name)
    shown = name == "mistral" or "[TOOL_CALLS]" not in reply
    assert found == Read(reply if shown else "", "", [])


def test_text_goes_on_where_arguments_are_none(tokenizer: Tokenizer) -> None:
    reply = '<tool_call>\n{"name": "light", "arguments": {"text": "a", nonsense}}\n</tool_call> b'
    pieces = [*pieces_of(tokenizer, reply, KNOWN_FORMATS["hermes"])]
    given = "".join(call.arguments for one in pieces for call in one.calls)
    assert given == '{"text": "a", '
    assert not any(call.complete for one in pieces for call in one.calls)
    assert "".join(one.text for one in pieces) == "nonsense}}\n</tool_call> b"


def test_a_call_behind_one_that_breaks_off_has_a_number_of_its_own(tokenizer: Tokenizer) -> None:
    broken = '<tool_call>\n{"name": "light", "arguments": {"text": "a", nonsense}}\n</tool_call>'
    reply = f"{broken} {spell(KNOWN_FORMATS['hermes'], CALLS[0])}"
    found = [
        call for one in pieces_of(tokenizer, reply, KNOWN_FORMATS["hermes"]) for call in one.calls
    ]
    assert [call.index for call in found if call.id] == [0, 1]
    arguments = "".join(call.arguments for call in found if call.index == 1)
    assert json.loads(arguments) == CALLS[0][0][1]
    assert [call.index for call in found if call.complete] == [1]


@pytest.mark.parametrize("name", FORMS)
def test_a_reply_may_end_with_the_last_argument(tokenizer: Tokenizer, name: str) -> None:
    shape = KNOWN_FORMATS[name]
    assert shape.calls is not None
    closes = (shape.calls.call[1] + shape.calls.section[1]).strip()
    reply = spell(shape, CALLS[0]).strip()
    cut = reply.removesuffix(closes) if shape.calls.kind in {"json", "named"} else reply
    assert read_reply(tokenizer, cut, name).calls == CALLS[0]


@pytest.mark.parametrize("name", FORMS)
def test_a_reply_grows_without_a_copy_of_it(name: str) -> None:
    """Where anything else holds the text while it waits, each token copies all of it."""
    shape = KNOWN_FORMATS[name]
    parser = ReplyParser(shape, {}, TOOLS, in_reasoning=False)
    held_once = SimpleNamespace(text="".join("ab"))
    for character in "".join(shape.reasoning) + "so: " + spell(shape, CALLS[2]) + " end":
        parser.feed(character)
        # All Python shares texts of one character.
        if len(parser.text) > 1:
            assert sys.getrefcount(parser.text) == sys.getrefcount(held_once.text)


@pytest.mark.parametrize(
    ("opened", "reasoning"), [(False, "<think>ab</think>"), (True, "ab</think>")]
)
def test_it_says_which_tokens_are_reasoning(
    tokenizer: Tokenizer, reasoning: str, *, opened: bool
) -> None:
    reader = ReplyReader(tokenizer, KNOWN_FORMATS["hermes"], tools=TOOLS, in_reasoning=opened)
    states = []
    for number in tokenizer.encode_piece(reasoning + "c"):
        reader.push(number)
        states.append(reader.in_reasoning)
    start = 0 if opened else len(tokenizer.encode_piece("<think>")) - 1
    expected = [start <= place < len(states) - 2 for place in range(len(states))]
    assert states == expected


def test_a_stop_string_is_looked_for_in_the_answer_alone(tokenizer: Tokenizer) -> None:
    reply = "<think>STOP</think>Light STOP. On."
    reader = ReplyReader(tokenizer, KNOWN_FORMATS["hermes"], ["On", "STOP"], TOOLS)
    pieces = [reader.push(number) for number in tokenizer.encode_piece(reply)]
    pieces.append(reader.finish())
    assert (reader.stopped, reader.stop_string) == (True, "STOP")
    assert read(pieces) == Read("Light ", "STOP", [])


fragments = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "\n", " ", '{"name": ', '"light"', ', "arguments": '),
            *('{"text": "a"}', "}", "{", "[", "]", "light", "<function=", ">", "</function>", '"'),
            *("<parameter=text>", "</parameter>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"),
            *(
                "\\",
                "é🙂",
                "<",
                "text",
                "(",
                ")",
                "=1",
                ",",
                "<|tool_call_start|>[",
                "call:",
                '<|"|>',
            ),
            *("<|tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "12", ":"),
        ]
    ),
    max_size=14,
).map("".join)


@settings(deadline=None, max_examples=300)
@given(reply=fragments, name=st.sampled_from(FORMS), opened=st.booleans())
def test_nothing_raises_and_nothing_is_lost(reply: str, name: str, *, opened: bool) -> None:
    parser = ReplyParser(KNOWN_FORMATS[name], {}, TOOLS, in_reasoning=opened)
    pieces = [parser.feed(one) for one in reply] + [parser.feed("", ended=True)]
    whole = ReplyParser(KNOWN_FORMATS[name], {}, TOOLS, in_reasoning=opened)
    at_once = [whole.feed(reply), whole.feed("", ended=True)]
    marks = [mark.strip() for mark in KNOWN_FORMATS[name].reasoning if mark]
    for found in (pieces, at_once):
        if not any(one.calls for one in found):
            text = "".join(one.reasoning for one in found) + "".join(one.text for one in found)
            assert without(text, marks) == without(reply, marks)


def without(text: str, marks: Sequence[str]) -> str:
    """`text` without marks and white space."""
    for mark in marks:
        text = text.replace(mark, "")
    return "".join(text.split())


@settings(deadline=None)
@given(reply=fragments, stop=st.sampled_from([(), ("light",), ("<", "te")]))
def test_without_a_format_it_is_a_text_stream(
    tokenizer: Tokenizer, reply: str, stop: tuple[str, ...]
) -> None:
    stream, reader = TextStream(tokenizer, stop), ReplyReader(tokenizer, None, stop)
    for number in tokenizer.encode_piece(reply):
        assert reader.push(number) == ReplyPieces(stream.push(number))
    assert reader.finish() == ReplyPieces(stream.finish())
    assert reader.stop_string == stream.stop_string


@pytest.mark.parametrize(
    ("raw", "schema", "expected"),
    [
        ("12", {"type": "string"}, '"12"'), ("12", {"type": "integer"}, "12"),
        ("12", {}, "12"), ("twelve", {"type": "integer"}, '"twelve"'),
        ("True", {"type": "boolean"}, "true"), ("True", {"type": "string"}, '"True"'),
        ("None", {"type": ["string", "null"]}, "null"), ("3", {"type": ["string", "null"]}, '"3"'),
        ("{'a': [1, None]}", {"type": "object"}, '{"a": [1, null]}'), ('"x"', {}, '"\\"x\\""'),
        ("<![CDATA[1]]>", {"type": "string"}, '"1"'), ("1", {"$ref": "#/$defs/t"}, '"1"'),
        ("1", {"anyOf": [{"type": "null"}, {"type": "integer"}]}, "1"),
        ("a", {"enum": ["a"]}, '"a"'),
        ("1", {"enum": ["1"]}, '"1"'), ("1e999", {"type": "number"}, "1e999"), ("", {}, '""'),
        ("[" * 200, {}, '"' + "[" * 200 + '"'), ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("2.0", {"type": "integer"}, "2.0"), ("2.5", {"type": "integer"}, '"2.5"'),
    ],
)  # fmt: skip
def test_an_argument_has_the_type_of_its_schema(raw: str, schema: Any, expected: str) -> None:
    root = {"properties": {"a": schema}, "$defs": {"t": {"type": "string"}}}
    assert typed_json(raw, root, "a") == expected


def test_a_mark_may_stand_within_a_character(tokenizer: Tokenizer) -> None:
    (mark,) = tokenizer.encode_piece("[TOOL_CALLS]")
    fox = tokenizer.encode_piece("a🦊")
    reader = ReplyReader(tokenizer, KNOWN_FORMATS["mistral"], (), TOOLS)
    found = read([*map(reader.push, [*fox[:3], mark, *fox[3:], *fox]), reader.finish()])
    assert found.text.startswith("a\ufffd")
    assert found.text.endswith("a🦊")
    assert "[TOOL_CALLS]" in found.text


def test_pieces_of_a_character_wait(tokenizer: Tokenizer) -> None:
    found = read_reply(tokenizer, "<think>🙂</think>🦊", "hermes")
    assert found == Read("🦊", "🙂", [])
