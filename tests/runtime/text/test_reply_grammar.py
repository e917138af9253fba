from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.engine_folder import TOKENIZER_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.text.conversation import Conversation, ResponseFormat, Tool, Turn
from hearth.runtime.text.reply_format import KNOWN_FORMATS
from hearth.runtime.text.reply_grammar import enforced_schemas, reply_grammar
from hearth.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.folders import CHATML, byte_level, open_tokenizer, write_folder
from tests.runtime.text.test_reply_reader import PLAIN, SPECIAL, spell

llguidance = pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "mode": {"enum": ["eco", "full"]},
    },
    "required": ["text"],
}
STRICT = Tool("light", "Switches.", SCHEMA, strict=True)
LOOSE = Tool("clock", "Tells.", {"type": "object", "properties": {"zone": {"type": "string"}}})
ASKED = Conversation([Turn("user", "hi")], [STRICT, LOOSE])
FORMS = sorted(set(KNOWN_FORMATS) - {"none", "gpt-oss"})
REGEX = ResponseFormat("regex", grammar="a+")
Accepts = Callable[[str | None, str], bool]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = byte_level()
    library.add_special_tokens([*SPECIAL])
    library.add_tokens([*PLAIN])
    return write_folder(tmp_path_factory.mktemp("grammars"), library, CHATML)


@pytest.fixture(scope="module")
def accepts(folder: Path) -> Accepts:
    """Tells whether a grammar takes a reply to its end."""
    library = llguidance.LLTokenizer(str(folder / TOKENIZER_FILE), eos_token=[2])
    tokenizer = Tokenizer.open(folder)

    def check(grammar: str | None, reply: str) -> bool:
        assert grammar is not None
        matcher = llguidance.LLMatcher(library, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode_piece(reply)
        taken = matcher.try_consume_tokens(ids)
        ended: bool = matcher.is_accepting() or matcher.is_stopped()
        return taken == len(ids) and ended

    return check


def asked(**changes: Any) -> Conversation:
    return structs.replace(ASKED, **changes)


RIGHT: list[dict[str, Any]] = [
    {"text": "on"},
    {"text": "on", "count": 3},
    {"text": "", "mode": "eco"},
]
WRONG: list[dict[str, Any]] = [
    {"count": 3},
    {"text": "on", "count": "x"},
    {"text": "on", "mode": "no"},
]


@pytest.mark.parametrize("name", FORMS)
def test_forced_calls_follow_their_schema(folder: Path, accepts: Accepts, name: str) -> None:
    tokenizer, shape = Tokenizer.open(folder, name), KNOWN_FORMATS[name]
    grammar = reply_grammar(tokenizer, asked(tool_choice="=light"))
    # An enum is text or a word in quotes, which Python-like forms do not hold.
    for given in RIGHT:
        assert accepts(grammar, spell(shape, [("light", given)]))
    for given in WRONG:
        assert not accepts(grammar, spell(shape, [("light", given)]))
    assert not accepts(grammar, spell(shape, [("clock", {"zone": "x"})]))
    assert not accepts(grammar, "On it.")


@pytest.mark.parametrize("name", FORMS)
def test_one_call_or_several(folder: Path, accepts: Accepts, name: str) -> None:
    tokenizer, shape = Tokenizer.open(folder, name), KNOWN_FORMATS[name]
    two = spell(shape, [("light", {"text": "a"}), ("clock", {"zone": "b"})])
    assert accepts(reply_grammar(tokenizer, asked(tool_choice="required")), two)
    alone = asked(tool_choice="required", parallel_tool_calls=False)
    assert not accepts(reply_grammar(tokenizer, alone), two)
    twice = spell(shape, [("light", {"text": "a"}), ("light", {"text": "b"})])
    assert not accepts(reply_grammar(tokenizer, asked(tool_choice="=light")), twice)


@pytest.mark.parametrize("name", FORMS)
def test_text_is_free_until_a_call_begins(folder: Path, accepts: Accepts, name: str) -> None:
    tokenizer, shape = Tokenizer.open(folder, name), KNOWN_FORMATS[name]
    grammar = reply_grammar(tokenizer, ASKED)
    before = "" if name == "llama-3" else "So be it.\n"
    assert accepts(grammar, "Good day. {no} [call]")
    assert accepts(grammar, before + spell(shape, [("light", {"text": "on", "count": 3})]))
    assert accepts(grammar, before + spell(shape, [("clock", {"zone": "x"})]))
    assert not accepts(grammar, before + spell(shape, [("light", {"text": "on", "count": "x"})]))
    assert not accepts(grammar, before + spell(shape, [("other", {"text": "on"})]))


def test_nothing_is_asked_of_most_replies(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder, "hermes")
    assert reply_grammar(tokenizer, Conversation([])) is None
    assert reply_grammar(tokenizer, asked(tools=[LOOSE])) is None
    assert reply_grammar(tokenizer, asked(tool_choice="none")) is None


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_ends_with_its_budget(folder: Path, accepts: Accepts, *, opened: bool) -> None:
    tokenizer = Tokenizer.open(folder, "hermes")
    budget = Conversation([], reasoning_budget=4)
    grammar = reply_grammar(tokenizer, budget, in_reasoning=opened)
    start = "" if opened else "<think>"
    assert accepts(grammar, f"{start}abcd</think>\n\nyes")
    assert not accepts(grammar, f"{start}abcdefgh")
    assert accepts(grammar, "yes") is not opened
    none = reply_grammar(
        tokenizer, structs.replace(budget, reasoning_budget=0), in_reasoning=opened
    )
    assert accepts(none, f"{'</think>' if opened else ''}yes")
    assert not accepts(none, f"{start}ab</think>yes")


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (ResponseFormat("json_object"), '{"a": [1]}', "[1]"),
        (ResponseFormat("json_schema", SCHEMA), '{"text": "a"}', '{"text": 1}'),
        (REGEX, "aaa", "b"),
        (ResponseFormat("lark", grammar='start: "x" y\ny: /[0-9]+/'), "x12", "xy"),
        (ResponseFormat("lark", grammar='start: "x" /x+/ | /a+/ /a+/'), "xx", "xy"),
    ],
)
def test_an_answer_has_its_form_behind_reasoning(
    folder: Path, accepts: Accepts, form: ResponseFormat, right: str, wrong: str
) -> None:
    for name in ("hermes", "none"):
        tokenizer = Tokenizer.open(folder, name)
        before = "<think>ab</think>\n" if name == "hermes" else ""
        grammar = reply_grammar(tokenizer, Conversation([]), form)
        assert accepts(grammar, before + right)
        assert accepts(grammar, right)
        assert not accepts(grammar, before + wrong)
    tokenizer = Tokenizer.open(folder, "hermes")
    grammar = reply_grammar(tokenizer, ASKED, form)
    assert accepts(grammar, right)
    assert accepts(grammar, spell(KNOWN_FORMATS["hermes"], [("light", {"text": "a"})]))
    assert not accepts(grammar, wrong)


@pytest.mark.parametrize("form", [REGEX, ResponseFormat("lark", grammar="start: /a+/")])
def test_an_answer_of_channels_has_its_form_in_the_last(
    folder: Path, accepts: Accepts, form: ResponseFormat
) -> None:
    tokenizer = Tokenizer.open(folder, "gpt-oss")
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    grammar = reply_grammar(tokenizer, Conversation([]), form)
    assert accepts(grammar, f"{thought}{final}aa")
    assert accepts(grammar, f"{final}aa")
    for wrong in ("aa", f"{thought}{final}b", f"{thought}aa"):
        assert not accepts(grammar, wrong)
    none = reply_grammar(tokenizer, Conversation([], reasoning_budget=0), form)
    assert accepts(none, f"{final}aa")
    assert not accepts(none, f"{thought}{final}aa")


@pytest.mark.parametrize("name", [one for one in FORMS if KNOWN_FORMATS[one].reasoning[1]])
def test_a_budget_leaves_calls_possible(folder: Path, accepts: Accepts, name: str) -> None:
    tokenizer, shape = Tokenizer.open(folder, name), KNOWN_FORMATS[name]
    grammar = reply_grammar(tokenizer, asked(tools=[LOOSE], reasoning_budget=4))
    assert accepts(grammar, spell(shape, [("clock", {"zone": "x", "more": 1})]))
    assert accepts(grammar, "plain")


@pytest.mark.parametrize(
    ("name", "schema", "word"),
    [
        ("qwen3-coder", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ("qwen3-coder", {"properties": {}, "minProperties": 1}, "minProperties"),
        ("glm-4", {"properties": {}, "required": ["b"]}, "required: b"),
        ("lfm2", {"properties": {"a": {"type": "integer", "minimum": 1}}}, "minimum"),
    ],
)
def test_what_a_form_cannot_hold_is_refused_by_its_keyword(
    folder: Path, name: str, schema: dict[str, Any], word: str
) -> None:
    tools = [LOOSE, Tool("f", parameters={"type": "object", **schema}, strict=True)]
    with pytest.raises(HearthError, match=word) as caught:
        reply_grammar(Tokenizer.open(folder, name), asked(tools=tools))
    assert (caught.value.code, caught.value.field) == ("grammar_invalid", "tools[1].parameters")


def test_what_a_model_does_not_mark_is_refused(folder: Path, tmp_path: Path) -> None:
    budget = Conversation([], reasoning_budget=4)
    spelled = open_tokenizer(tmp_path, byte_level())
    mistral = Tokenizer.open(write_folder(tmp_path, byte_level()), "mistral")
    for tokenizer in (Tokenizer.open(folder, "none"), mistral, spelled):
        with pytest.raises(HearthError) as caught:
            reply_grammar(tokenizer, budget)
        assert (caught.value.code, caught.value.field) == ("unsupported_option", "reasoning_budget")
    for name in ("none", "gpt-oss"):
        with pytest.raises(HearthError) as caught:
            reply_grammar(Tokenizer.open(folder, name), asked(tool_choice="required"))
        assert (caught.value.code, caught.value.field) == ("unsupported_option", "tools")


def test_schemas_to_check_are_those_that_are_held() -> None:
    schema = ResponseFormat("json_schema", True)
    assert enforced_schemas(ASKED, schema) == {
        "tools[0].parameters": SCHEMA,
        "response_format.schema": True,
    }
    assert [*enforced_schemas(asked(tool_choice="=clock"))] == ["tools[1].parameters"]
    assert enforced_schemas(asked(tool_choice="none")) == {}


def test_a_name_of_a_rule_is_of_one_tool(folder: Path, accepts: Accepts) -> None:
    tools = [Tool("a.b", parameters=SCHEMA), Tool("a-b", parameters=LOOSE.parameters)]
    tokenizer = Tokenizer.open(folder, "hermes")
    grammar = reply_grammar(tokenizer, asked(tools=tools, tool_choice="required"))
    shape = KNOWN_FORMATS["hermes"]
    assert accepts(grammar, spell(shape, [("a-b", {"zone": "x"})]))
    assert not accepts(grammar, spell(shape, [("a.b", {"zone": "x"})]))
