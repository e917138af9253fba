"""Goals, turns and tools of ROS messages as the client takes them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec

from hearth_client import GenerateOptions, Image, InvalidValue, Message, Tool, UnsupportedOption
from hearth_ros.images import picture_of

Turn: TypeAlias = Message | dict[str, Any]
"""A turn of the conversation as the client takes it."""
SERVICE_TYPES = ("hearth_msgs/CallTool", "std_srvs/SetBool", "std_srvs/Trigger")
"""Types of the services that may answer a tool; the first one where none is named."""
PLAIN = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "adapter",
    "priority",
    "deadline_s",
)
"""Options that a goal has fields for; 0 and empty leave the default."""
_ELSEWHERE = {*PLAIN, "tools", "tool_choice", "response_format"}
# Result and feedback have no field for what these ask for.
_NOT_HERE = {"n": "a goal has one reply", "logprobs": "replies come without", "timestamps": ""}


class ServiceTool(NamedTuple):
    """A tool, and the ROS service that answers it; an empty name leaves the call to the asker."""

    tool: Tool
    service: str = ""
    service_type: str = SERVICE_TYPES[0]


class Ask(NamedTuple):
    """One request: a raw prompt or turns, tools, and options by their names."""

    prompt: str | None
    turns: list[Turn]
    tools: list[ServiceTool]
    options: GenerateOptions


class _DeclaredTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool in a file; `parameters` may be a JSON schema or its text."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | str = ""
    strict: bool = False
    service: str = ""
    service_type: str = ""


def ask_of(goal: Any) -> Ask:
    """Take a Generate goal; raises RequestRefused with the field at fault."""
    if bool(goal.prompt) == bool(goal.messages):
        raise InvalidValue("a goal has a prompt or messages, exactly one of them", "prompt")
    return Ask(
        prompt=goal.prompt or None,
        turns=turns_of(goal.messages),
        tools=tools_of(goal.tools),
        options=options_of(goal),
    )


def options_of(source: Any) -> GenerateOptions:
    """Options of a goal, or of the settings, which have some of its fields."""
    options = _object(source.options, "options")
    for name in options:
        if name in _NOT_HERE:
            raise UnsupportedOption(f"{name} is not offered by the node: {_NOT_HERE[name]}", name)
        if name in _ELSEWHERE:
            raise InvalidValue(f"{name} has a field of its own", f"options.{name}")
    for name in PLAIN:
        value = getattr(source, name, None)
        if value:
            options[name] = list(value) if name == "stop" else value
    choice = source.tool_choice
    if choice:
        named = choice not in {"auto", "none", "required"}
        options["tool_choice"] = {"name": choice} if named else choice
    if source.response_format:
        options["response_format"] = _object(source.response_format, "response_format")
    return cast(GenerateOptions, options)


def turns_of(messages: Iterable[Any]) -> list[Turn]:
    """Take Turn messages, pictures before the text of each."""
    return [_turn_of(one, f"messages[{index}]") for index, one in enumerate(messages)]


def tools_of(messages: Iterable[Any]) -> list[ServiceTool]:
    """Take Tool messages, or tools of a file."""
    return [_tool_of(one, f"tools[{index}]") for index, one in enumerate(messages)]


def read_tools(path: str) -> list[ServiceTool]:
    """Tools of a JSON file, none where the path is empty; raises InvalidValue for another form."""
    if not path:
        return []
    try:
        declared = msgspec.json.decode(Path(path).read_bytes(), type=list[_DeclaredTool])
    except OSError:
        raise InvalidValue(f"{path} cannot be read", "tools_file") from None
    except msgspec.MsgspecError as error:
        place = str(error).rpartition(" - at ")[2] if " - at " in str(error) else "it"
        text = f"{path} is no JSON list of tools: {place} is wrong"
        raise InvalidValue(text, "tools_file") from None
    return tools_of(declared)


def with_picture(turn: Turn, picture: Image) -> Turn:
    """Put a picture before the content of a user's turn."""
    if isinstance(turn, Message) or turn.get("role") != "user":
        raise InvalidValue(
            "a picture goes into the last turn, which has to be the user's", "messages"
        )
    content = turn["content"]
    return {**turn, "content": [picture, *([content] if isinstance(content, str) else content)]}


def _turn_of(message: Any, field: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role}
    pictures = [picture_of(one) for one in (*message.images, *message.compressed_images)]
    if pictures:
        turn["content"] = [*pictures, *([message.content] if message.content else [])]
    elif message.content or not message.tool_calls:
        turn["content"] = message.content
    if message.reasoning:
        turn["reasoning"] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "name": call.name,
                "arguments": _object(call.arguments, f"{field}.tool_calls[{index}].arguments"),
            }
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _tool_of(message: Any, field: str) -> ServiceTool:
    kind = message.service_type or SERVICE_TYPES[0]
    if kind not in SERVICE_TYPES:
        text = f"{kind} answers no tool: it is one of {', '.join(SERVICE_TYPES)}"
        raise InvalidValue(text, f"{field}.service_type")
    schema = message.parameters
    if isinstance(schema, str):
        schema = _object(schema, f"{field}.parameters")
    tool = Tool(
        name=message.name,
        description=message.description,
        parameters=schema,
        strict=message.strict,
    )
    return ServiceTool(tool, message.service, kind)


def _object(text: str, field: str) -> dict[str, Any]:
    """A JSON object, empty where the text is."""
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise InvalidValue(f"{field} is no JSON object", field) from None
