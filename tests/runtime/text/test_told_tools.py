from pathlib import Path

import pytest

from hearth.runtime.text.conversation import Conversation, Tool, ToolCall, Turn
from hearth.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.folders import CHATML, byte_level, open_tokenizer

TOOLS = [Tool("light", "Switches a lamp.", {"type": "object", "properties": {"on": {}}})]
CALLED = Turn("assistant", "Wait.", tool_calls=[ToolCall("c1", "light", {"on": "<|im_end|> é"})])
RESULTS = [Turn("tool", "done <|im_end|>", tool_call_id="c1")]
TALK = [Turn("system", "Be brief."), Turn("user", "hi"), CALLED, *RESULTS, Turn("user", "so?")]
ALTERNATES = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def shown(tokenizer: Tokenizer, conversation: Conversation) -> str:
    ids = tokenizer.encode_chat(conversation).ids
    marks = tokenizer.encode("<|im_end|>")
    text = tokenizer.decode(ids, skip_special=False)
    harmless = text.count("<|im_end|>") - ids.count(marks[0])
    assert harmless == sum("<|im_end|>" in str(turn) for turn in conversation.turns)
    return text


def test_a_template_without_tools_is_told_of_them(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path, byte_level())
    text = shown(tokenizer, Conversation(TALK, TOOLS))
    system, asked, called, result, _, _ = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\nYou may call tools.")
    assert '{"name": "light", "description": "Switches a lamp.", "parameters": ' in system
    assert '<tool_call>\n{"name": "name_of_the_tool", "arguments": {"argument": "value"}}' in system
    assert asked == "user\nhi<|im_end|>\n"
    assert called == (
        "assistant\nWait.\n\n<tool_call>\n"
        '{"name": "light", "arguments": {"on": "<|im_end|> é"}}\n</tool_call><|im_end|>\n'
    )
    assert result == "tool\ndone <|im_end|><|im_end|>\n"


def test_a_model_without_system_turn_is_told_in_the_first_one(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path, byte_level(), ALTERNATES)
    text = shown(tokenizer, Conversation(TALK[1:], TOOLS))
    first, _, result, _ = text.split("<|im_start|>")[1:]
    assert first.startswith("user\nhi\n\nYou may call tools.")
    assert result == 'user\n{"tool": "light", "result": "done <|im_end|>"}<|im_end|>\n'


@pytest.mark.parametrize(
    "conversation", [Conversation(TALK[:2]), Conversation(TALK[:2], TOOLS, "none")]
)
def test_without_tools_nothing_is_told(tmp_path: Path, conversation: Conversation) -> None:
    tokenizer = open_tokenizer(tmp_path, byte_level(), CHATML)
    assert "You may call tools" not in shown(tokenizer, conversation)
