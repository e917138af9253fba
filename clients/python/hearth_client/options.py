"""The options of a generation, as keywords of `generate`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from hearth_client.errors import InvalidValue, UnsupportedOption
from hearth_client.protocol import Generate, Message, Role

Turns = Sequence[Message | Mapping[str, str]]
"""A conversation: `Message` structs, or mappings with `role` and `content`."""


class GenerateOptions(TypedDict, total=False):
    """What `generate` may be given; PROTOCOL.md has ranges and defaults."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Sequence[tuple[int, float]]
    seed: int | None
    stop: Sequence[str]
    logprobs: int | None
    ignore_eos: bool
    priority: int
    deadline_s: float | None
    timestamps: bool
    speculation: bool | None
    traceparent: str | None


def generate_request(
    request_id: str, prompt: str | None, messages: Turns | None, options: Mapping[str, Any]
) -> Generate:
    """Build the message; values are checked by the server, which names the field at fault."""
    for name in options:
        if name not in GenerateOptions.__annotations__:
            raise UnsupportedOption(f"{name} is not an option of generate", name)
    turns = None if messages is None else as_messages(messages)
    return Generate(id=request_id, prompt=prompt, messages=turns, **options)


def as_messages(turns: Turns) -> list[Message]:
    """Messages from structs or mappings; raises InvalidValue for a mapping of another shape."""
    return [
        turn if isinstance(turn, Message) else _message(turn, index)
        for index, turn in enumerate(turns)
    ]


def _message(turn: Mapping[str, str], index: int) -> Message:
    if set(turn) != {"role", "content"}:
        field = f"messages[{index}]"
        raise InvalidValue(f"{field} must have role and content and nothing else", field)
    return Message(role=cast("Role", turn["role"]), content=turn["content"])
