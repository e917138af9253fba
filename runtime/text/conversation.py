"""Conversations as clients give them: one struct from the front door to the chat template."""

import math
import re
from collections.abc import Collection, Iterable
from typing import Any, Literal, cast, get_args

import msgspec

from hearth.runtime.errors import HearthError

MAX_TOOLS = 128
MAX_CALLS = 128
"""Calls of one turn."""
MAX_TOOL_CHARACTERS = 1 << 18
"""Characters in all names, descriptions and schemas of the tools of a request."""
MAX_DEPTH = 64
"""Lists and maps inside one another, in a schema or in arguments."""
MAX_VALUES = 1 << 15
"""Values in all schemas of tools and arguments of calls, the keys among them."""
_CALL_VALUES = 16
"""Values that a call counts for, beside its arguments."""
OWN_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "messages",
        "raise_exception",
        "strftime_now",
        "tools",
    }
)
"""Variables of chat templates that a request does not set by their names."""
_LONGEST_ID = 256
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

Role = Literal["system", "developer", "user", "assistant", "tool"]
Variable = bool | int | float | str | None


class TurnPart(msgspec.Struct, frozen=True, array_like=True):
    """A piece of text, or the place of the next visual of its request."""

    kind: Literal["text", "image", "video"]
    text: str = ""


class ToolCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of a tool by the model; `arguments` is a map of any depth."""

    id: str
    name: str
    arguments: dict[str, Any]


class Turn(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One turn: text, or in its place parts where visuals are among it.

    Turns of the assistant may have `reasoning` and `tool_calls`, then also without content. A turn
    of a tool has the id of the call that it answers, and the tool's name where that is known.
    """

    role: Role
    content: str = ""
    parts: list[TurnPart] = []
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""
    name: str = ""


class Tool(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A tool that the model may call; `parameters` is a JSON schema of its arguments.

    With `strict` arguments follow the schema also where the model chooses by itself to call.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class ResponseFormat(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Form that the answer must have: any JSON object, or by a JSON schema, regex or Lark grammar.

    `schema` is set for "json_schema", `grammar` for "regex" and "lark".
    """

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    schema: dict[str, Any] | bool | None = None
    grammar: str = ""


class Conversation(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Turns, and the tools that the model may call.

    `tool_choice` is "none", "auto", "required", or "=" and the name of one of the tools.
    `variables` are those of the chat template, as `enable_thinking`. `reasoning_budget` is the most
    tokens of reasoning; None leaves it to the model.
    """

    turns: list[Turn]
    tools: list[Tool] = []
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    variables: dict[str, Variable] = {}
    reasoning_budget: int | None = None


def plain_conversation(turns: Iterable[tuple[str, str]]) -> Conversation:
    """A conversation of (role, text) alone, to be checked."""
    return Conversation([Turn(cast("Role", role), content) for role, content in turns])


def has_tools(conversation: Conversation) -> bool:
    """Return True if a conversation has tools, calls or results."""
    return bool(conversation.tools) or any(
        turn.tool_calls or turn.role == "tool" for turn in conversation.turns
    )


def takes_one_call(conversation: Conversation) -> bool:
    """Return True if a reply ends behind its first call: of a named tool, or none in parallel."""
    return conversation.tool_choice[:1] == "=" or not conversation.parallel_tool_calls


class JsonValues:
    """Checks the JSON values of one request: `MAX_VALUES` at most, nested `MAX_DEPTH` deep.

    Keys have to be text, numbers finite, and text valid Unicode.
    """

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def check(self, value: Any, field: str) -> int:
        """Count the characters of a value, about; raises `invalid_value` where it is none."""
        size, level = 0, [[value]]
        for _ in range(MAX_DEPTH + 1):
            inner = sum(len(one) for items in level for one in items if type(one) in _NESTED)
            if inner > self._left:
                # Before anything is looked at: 80,000 keys hold up other clients.
                self.take(inner, field)
            size += sum(self._size(items, field) for items in level)
            level = [
                [*one, *one.values()] if type(one) is dict else one
                for items in level
                for one in items
                if type(one) in _NESTED
            ]
            if not level:
                return size
        text = f"lists and objects lie at most {MAX_DEPTH} deep"
        raise HearthError("invalid_value", text, field)

    def take(self, count: int, field: str) -> None:
        """Count values; raises `invalid_value` where there are too many."""
        self._left -= count
        if self._left < 0:
            text = f"this request has more than {MAX_VALUES} values in tools and calls"
            raise HearthError("invalid_value", text, field)

    def _size(self, items: list[Any], field: str) -> int:
        """Check the values of one list, without what they contain."""
        self.take(len(items), field)
        kinds = {*map(type, items)}
        if not kinds <= _JSON:
            raise HearthError("invalid_value", "this is no value of JSON", field)
        if float in kinds and not all(math.isfinite(one) for one in items if type(one) is float):
            raise HearthError("invalid_value", "a number is not finite", field)
        if dict in kinds:
            keys = {type(key) for one in items if type(one) is dict for key in one}
            if not keys <= {str}:
                raise HearthError("invalid_value", "keys of objects are text", field)
        size = 6 * len(items)
        if str in kinds:
            size += len(check_text("".join(one for one in items if type(one) is str), field))
        return size


_NESTED = frozenset({dict, list})
_JSON = frozenset({dict, list, str, int, float, bool, type(None)})


def check_conversation(conversation: Conversation) -> None:
    """Raise `invalid_value`, with the field, where a conversation contradicts itself.

    Checked are text that is no Unicode, the bounds above, names, that results and calls belong
    together, that a chosen tool is there, and that variables are not Hearth's own.
    """
    calls: dict[str, bool] = {}
    values = JsonValues()
    # All at once, as each takes a moment.
    values.take(_CALL_VALUES * sum(len(turn.tool_calls) for turn in conversation.turns), "messages")
    for index, turn in enumerate(conversation.turns):
        field = f"messages[{index}]"
        _check_turn(turn, field)
        if turn.role == "tool":
            _answer(calls, turn.tool_call_id, f"{field}.tool_call_id")
        elif turn.role == "assistant":
            calls = {}
            for number, call in enumerate(turn.tool_calls):
                _check_call(call, calls, f"{field}.tool_calls[{number}]", values)
                calls[call.id] = False
    _check_tools(conversation, values)
    for name, value in conversation.variables.items():
        field = f"template.{name if name.isascii() and name.isprintable() else '?'}"
        if not _VARIABLE.fullmatch(name) or name in OWN_VARIABLES or name.endswith("_token"):
            raise HearthError("invalid_value", "this name is not free for a variable", field)
        values.check(value, field)
    budget = conversation.reasoning_budget
    if budget is not None and budget < 0:
        raise HearthError("invalid_value", "a budget is no less than 0", "reasoning_budget")


def _check_turn(turn: Turn, field: str) -> None:
    # Some templates build special tokens from the role.
    if turn.role not in get_args(Role):
        text = f"a role is one of {', '.join(get_args(Role))}"
        raise HearthError("invalid_value", text, f"{field}.role")
    check_text(turn.content, f"{field}.content")
    for part in turn.parts:
        check_text(part.text, f"{field}.content")
    check_text(turn.reasoning, f"{field}.reasoning")
    if turn.role != "assistant" and (turn.tool_calls or turn.reasoning):
        what = "tool_calls" if turn.tool_calls else "reasoning"
        raise HearthError("invalid_value", "only the assistant has these", f"{field}.{what}")
    if turn.role != "tool" and (turn.tool_call_id or turn.name):
        what = "tool_call_id" if turn.tool_call_id else "name"
        raise HearthError("invalid_value", "only results of tools have these", f"{field}.{what}")
    if turn.name:
        _check_name(turn.name, f"{field}.name")
    if len(turn.tool_calls) > MAX_CALLS:
        text = f"a turn has at most {MAX_CALLS} calls"
        raise HearthError("invalid_value", text, f"{field}.tool_calls")


def _check_call(call: ToolCall, earlier: Collection[str], field: str, values: JsonValues) -> None:
    check_text(call.id, f"{field}.id")
    if not 0 < len(call.id) <= _LONGEST_ID or call.id in earlier:
        text = f"an id has 1 to {_LONGEST_ID} characters and is of one call of its turn"
        raise HearthError("invalid_value", text, f"{field}.id")
    _check_name(call.name, f"{field}.name")
    if not isinstance(call.arguments, dict):
        raise HearthError("invalid_value", "arguments are an object", f"{field}.arguments")
    values.check(call.arguments, f"{field}.arguments")


def _answer(calls: dict[str, bool], call_id: str, field: str) -> None:
    if call_id not in calls:
        text = "this is not the id of a call in the assistant's turn before"
        raise HearthError("invalid_value", text, field)
    if calls[call_id]:
        raise HearthError("invalid_value", "this call has a result already", field)
    calls[call_id] = True


def _check_tools(conversation: Conversation, values: JsonValues) -> None:
    tools = conversation.tools
    if len(tools) > MAX_TOOLS:
        raise HearthError("invalid_value", f"a request has at most {MAX_TOOLS} tools", "tools")
    size = 0
    names: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        _check_name(tool.name, f"{field}.name")
        if tool.name in names:
            raise HearthError("invalid_value", "two tools have this name", f"{field}.name")
        names.add(tool.name)
        check_text(tool.description, f"{field}.description")
        size += len(tool.name) + len(tool.description)
        size += values.check(tool.parameters, f"{field}.parameters")
        if size > MAX_TOOL_CHARACTERS:
            text = f"tools have at most {MAX_TOOL_CHARACTERS} characters in all"
            raise HearthError("invalid_value", text, "tools")
    choice = conversation.tool_choice
    if choice in {"none", "auto"}:
        return
    if not tools or (choice != "required" and (choice[:1] != "=" or choice[1:] not in names)):
        raise HearthError("invalid_value", "there is no such tool to choose", "tool_choice")


def _check_name(name: str, field: str) -> None:
    if not _NAME.fullmatch(name):
        text = "a tool's name has 1 to 128 letters, digits and signs of _ . : / -"
        raise HearthError("invalid_value", text, field)


def check_text(text: str, field: str) -> str:
    """`text`; raises `invalid_value` where it has lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HearthError(
            "invalid_value", "text must be valid Unicode, without lone surrogates", field
        ) from error
    return text
