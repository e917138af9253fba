"""Conversations as clients give them: one struct from the front door to the chat template."""

from typing import Any, Literal

import msgspec

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
