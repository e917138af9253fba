"""Parameters of the node, the same in ROS 1 and ROS 2."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from hearth_client import InvalidValue


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """Parameters by their names; those from system_prompt to history_turns are of prompt topics."""

    address: Annotated[
        str, Meta(description="Path of the daemon's socket; empty: $HEARTH_SOCKET, else its place.")
    ] = ""
    connect_timeout_s: Annotated[
        float, Meta(description="Seconds to wait for a daemon that is not there.", gt=0.0)
    ] = 5.0
    request_timeout_s: Annotated[
        float, Meta(description="Seconds that a service waits for the daemon's answer.", gt=0.0)
    ] = 10.0
    system_prompt: Annotated[
        str, Meta(description="Text of the system turn; empty: no such turn.")
    ] = ""
    response_format: Annotated[
        str, Meta(description="JSON of the form that replies have, as in the action; empty: any.")
    ] = ""
    max_tokens: Annotated[
        int, Meta(description="Tokens of a reply at most; 0: as many as fit.", ge=0, le=1 << 20)
    ] = 0
    temperature: Annotated[
        float, Meta(description="0 takes the most likely token always.", ge=0.0, le=100.0)
    ] = 0.0
    adapter: Annotated[str, Meta(description="Name of the LoRA adapter; empty: none.")] = ""
    options: Annotated[
        str, Meta(description="JSON object of further options of generate; empty: none.")
    ] = ""
    tools_file: Annotated[
        str, Meta(description="Path of a JSON list of tools, fields as in Tool.msg; empty: none.")
    ] = ""
    tool_choice: Annotated[
        str, Meta(description="auto, none, required, or the name of the tool to call; empty: auto.")
    ] = ""
    history_turns: Annotated[
        int, Meta(description="Prompts before that a prompt is asked with.", ge=0, le=60)
    ] = 8
    interrupt: Annotated[
        bool, Meta(description="A new prompt ends the reply before it, in place of waiting.")
    ] = False
    queue: Annotated[
        int, Meta(description="Prompts that may wait; more are refused.", ge=1, le=64)
    ] = 8
    sentence_chars: Annotated[
        int, Meta(description="Characters after which a sentence without end is cut.", ge=20)
    ] = 300
    max_rounds: Annotated[
        int, Meta(description="Replies of one goal or prompt at most, tools between.", ge=1, le=64)
    ] = 5
    tool_timeout_s: Annotated[
        float, Meta(description="Seconds that a tool's service may take.", gt=0.0)
    ] = 10.0
    image_rate_hz: Annotated[
        float, Meta(description="Pictures a second that are taken at most; 0: all.", ge=0.0)
    ] = 5.0
    late_frame_s: Annotated[
        float, Meta(description="Age of a picture that is warned about; 0: none.", ge=0.0)
    ] = 1.0
    diagnostics_period_s: Annotated[
        float, Meta(description="Seconds between two diagnostics; 0: none.", ge=0.0)
    ] = 1.0


class Parameter(NamedTuple):
    """A parameter as a node declares it."""

    name: str
    default: Any
    description: str


def parameters() -> Iterator[Parameter]:
    """Yield all parameters in their order."""
    for field in msgspec.structs.fields(Settings):
        (meta,) = (one for one in field.type.__metadata__ if isinstance(one, Meta))
        yield Parameter(field.name, field.default, meta.description or "")


def read_settings(read: Callable[[str, Any], Any]) -> Settings:
    """Settings from `read`, which gets name and default; raises InvalidValue with the name."""
    values = {one.name: read(one.name, one.default) for one in parameters()}
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        name = str(error).rpartition(" - at `$.")[2].rstrip("`")
        says = next(one.description for one in parameters() if one.name == name)
        raise InvalidValue(f"parameter {name} cannot be {values[name]!r}. {says}", name) from None
