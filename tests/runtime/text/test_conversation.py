from collections.abc import Mapping
from typing import Any, cast

import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.text.conversation import (
    MAX_CALLS,
    MAX_DEPTH,
    MAX_TOOL_CHARACTERS,
    MAX_TOOLS,
    Conversation,
    Role,
    Tool,
    ToolCall,
    Turn,
    check_conversation,
)

CALL = ToolCall("c1", "light", {"on": True})
ASKED, CALLED = Turn("user", "hi"), Turn("assistant", tool_calls=[CALL])
RESULT = Turn("tool", "done", tool_call_id="c1")
LIGHT = Tool("light")


def deep(levels: int) -> Any:
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


def called(**changes: Any) -> Turn:
    return Turn("assistant", tool_calls=[structs.replace(CALL, **changes)])


RIGHT = [
    Conversation([]),
    Conversation([ASKED, CALLED, RESULT, ASKED], [LIGHT], "required"),
    Conversation([ASKED, CALLED, ASKED, CALLED, RESULT], [LIGHT], "=light"),
    Conversation([ASKED], [LIGHT], variables={"enable_thinking": False, "effort": "low"}),
    Conversation([called(arguments={"a": deep(MAX_DEPTH - 2)})]),
    Conversation([called(name="mcp.server:tool/a-b_c")]),
    Conversation([Turn("developer", "be brief")], reasoning_budget=0),
]


@pytest.mark.parametrize("conversation", RIGHT)
def test_what_fits_together_passes(conversation: Conversation) -> None:
    check_conversation(conversation)


WRONG: Mapping[str, Conversation] = {
    "messages[0].role": Conversation([Turn(cast("Role", "User"), "x")]),
    "messages[0].content": Conversation([Turn("user", "\ud800")]),
    "messages[0].reasoning": Conversation([Turn("assistant", reasoning="\udfff")]),
    "messages[1].reasoning": Conversation([ASKED, Turn("user", reasoning="x")]),
    "messages[1].tool_calls": Conversation([ASKED, Turn("user", tool_calls=[CALL])]),
    "messages[0].tool_calls": Conversation([Turn("assistant", tool_calls=[CALL] * MAX_CALLS * 2)]),
    "messages[0].name": Conversation([Turn("user", "x", name="light")]),
    "messages[0].tool_call_id": Conversation([RESULT]),
    "messages[2].tool_call_id": Conversation([CALLED, RESULT, RESULT]),
    "messages[3].tool_call_id": Conversation([CALLED, RESULT, called(id="c2"), RESULT]),
    "messages[0].tool_calls[1].id": Conversation([Turn("assistant", tool_calls=[CALL, CALL])]),
    "messages[0].tool_calls[0].id": Conversation([called(id="")]),
    "messages[0].tool_calls[0].name": Conversation([called(name="a b")]),
    "messages[0].tool_calls[0].arguments": Conversation([called(arguments=cast("Any", "{}"))]),
    "tools": Conversation([], [Tool(f"t{n}") for n in range(MAX_TOOLS + 1)]),
    "tools[0].name": Conversation([], [Tool("")]),
    "tools[1].name": Conversation([], [LIGHT, LIGHT]),
    "tools[0].description": Conversation([], [Tool("a", "\ud800")]),
    "tools[1].parameters": Conversation([], [LIGHT, Tool("a", parameters={"x": "\ud800"})]),
    "tool_choice": Conversation([], [LIGHT], "=lamp"),
    "template.tools": Conversation([], variables={"tools": None}),
    "template.bos_token": Conversation([], variables={"bos_token": "<s>"}),
    "template.a b": Conversation([], variables={"a b": 1}),
    "template.x": Conversation([], variables={"x": "\ud800"}),
    "reasoning_budget": Conversation([], reasoning_budget=-1),
}


@pytest.mark.parametrize("field", WRONG)
def test_what_does_not_is_refused_with_its_field(field: str) -> None:
    with pytest.raises(HearthError) as caught:
        check_conversation(WRONG[field])
    assert (caught.value.code, caught.value.field) == ("invalid_value", field)


@pytest.mark.parametrize("choice", ["required", "=light", "light", "", "any"])
def test_a_choice_needs_its_tool(choice: str) -> None:
    with pytest.raises(HearthError) as caught:
        check_conversation(Conversation([], [], choice))
    assert caught.value.field == "tool_choice"


@pytest.mark.parametrize(
    "value", [deep(100_000), {"a": "\ud800"}, {"\udfff": 1}, {1: 2}, float("nan"), b"x", {"a": {1}}]
)
def test_what_is_no_json_is_refused_at_any_depth(value: Any) -> None:
    with pytest.raises(HearthError) as caught:
        check_conversation(Conversation([called(arguments={"a": [value]})]))
    assert caught.value.field == "messages[0].tool_calls[0].arguments"


def test_tools_are_bounded_together() -> None:
    large = {"x": "y" * (MAX_TOOL_CHARACTERS // 2)}
    check_conversation(Conversation([], [Tool("a", parameters=large)]))
    with pytest.raises(HearthError) as caught:
        check_conversation(Conversation([], [Tool(n, parameters=large) for n in "ab"]))
    assert caught.value.field == "tools"
