from __future__ import annotations

from typing import Any

import pytest

from hearth.daemon.cli.local_prompts import (
    LocalPrompt,
    conversation_with,
    encode_prompt,
    grammar_of,
    read_reply,
)
from hearth.runtime.request import GeneratedRow, RequestOptions
from hearth.runtime.text.conversation import ResponseFormat, ToolCall, Turn
from hearth.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.folders import byte_level, open_tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS: list[dict[str, Any]] = [{"name": "f", "parameters": {"type": "object"}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("engine")
    open_tokenizer(folder, byte_level())
    return Tokenizer.open(folder, "hermes")


def test_a_prompt_is_ids_text_or_the_next_turn_of_a_conversation(tokenizer: Tokenizer) -> None:
    assert encode_prompt([5], tokenizer, None) == LocalPrompt([5])
    assert encode_prompt("abc", tokenizer, None) == LocalPrompt(tokenizer.encode("abc"))
    chat = conversation_with("s", [], {})
    prompt = encode_prompt("abc", tokenizer, chat)
    assert prompt.ids == tokenizer.encode_pairs([("system", "s"), ("user", "abc")])
    assert prompt.chat is not None
    assert prompt.chat.turns == [Turn("system", "s"), Turn("user", "abc")]
    assert chat.turns == [Turn("system", "s")]


def row(tokenizer: Tokenizer, text: str, *more: int) -> GeneratedRow:
    ids = [*tokenizer.encode(text), *more]
    return GeneratedRow(token_ids=ids, text="raw", logprobs=[], finish_reason="stop")


def test_a_reply_is_taken_apart_in_a_conversation(tokenizer: Tokenizer) -> None:
    prompt = encode_prompt("hi", tokenizer, conversation_with(None, TOOLS, {}))
    (end,) = tokenizer.encode("<|im_end|>")
    told = row(tokenizer, f"<think>hm</think>ok{CALL}", end)
    answer = read_reply(tokenizer, prompt, RequestOptions(), told, (end,))
    assert (answer.row.text, answer.reasoning) == ("ok", "hm")
    assert [(one.name, one.arguments) for one in answer.calls] == [("f", {"a": 1})]
    assert isinstance(answer.calls[0], ToolCall)


def test_a_reply_to_a_raw_prompt_stays_as_it_is(tokenizer: Tokenizer) -> None:
    told = row(tokenizer, CALL)
    assert read_reply(tokenizer, LocalPrompt([5]), RequestOptions(), told, ()).row is told
    options = RequestOptions(grammar='start: "on"')
    answer = read_reply(tokenizer, LocalPrompt([5]), options, row(tokenizer, "on"), (0,))
    assert answer.row.text == "on"


def test_a_prompt_has_the_grammar_of_what_is_asked(tokenizer: Tokenizer) -> None:
    pytest.importorskip("llguidance")
    form = ResponseFormat("json_schema", schema={"type": "integer"})
    assert grammar_of(tokenizer, LocalPrompt([5]), None) == ""
    assert grammar_of(tokenizer, LocalPrompt([5]), form).startswith("start: %json")
    prompt = encode_prompt("hi", tokenizer, conversation_with(None, [], {}))
    assert "%json" in grammar_of(tokenizer, prompt, form)
