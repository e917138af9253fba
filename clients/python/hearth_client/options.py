"""What `generate` is given: options as keywords, and a conversation with its pictures."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from hearth_client.errors import InvalidValue, UnsupportedOption
from hearth_client.pictures import Frame, Image, Video
from hearth_client.protocol import (
    Generate,
    ImagePart,
    Message,
    TextPart,
    VideoFrame,
    VideoPart,
)

Turns: TypeAlias = Sequence[Message | Mapping[str, Any]]
"""A conversation: `Message` structs, or mappings with `role` and `content`.

Content is text, or a list of texts, images and videos in their order.
"""


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
    adapter: str
    cache: Literal["use", "bypass", "pin"]
    cache_salt: str
    traceparent: str | None


def generate_request(
    request_id: str, prompt: str | None, messages: list[Message] | None, options: Mapping[str, Any]
) -> Generate:
    """Build the message; values are checked by the server, which names the field at fault."""
    for name in options:
        if name not in GenerateOptions.__annotations__:
            raise UnsupportedOption(f"{name} is not an option of generate", name)
    return Generate(id=request_id, prompt=prompt, messages=messages, **options)


def as_messages(turns: Turns | None) -> tuple[list[Message] | None, list[Frame]]:
    """Messages, and the frames of their pictures; raises InvalidValue for another shape."""
    frames: list[Frame] = []
    if turns is None:
        return None, frames
    return [_message(turn, index, frames) for index, turn in enumerate(turns)], frames


def _message(turn: Message | Mapping[str, Any], index: int, frames: list[Frame]) -> Message:
    if isinstance(turn, Message):
        return turn
    field = f"messages[{index}]"
    if set(turn) != {"role", "content"}:
        raise InvalidValue(f"{field} must have role and content and nothing else", field)
    content = turn["content"]
    if isinstance(content, (list, tuple)):
        content = [_part(one, field, frames) for one in content]
    # What else is no text the server refuses by name.
    return Message(role=turn["role"], content=content)


def _part(part: object, field: str, frames: list[Frame]) -> TextPart | ImagePart | VideoPart:
    if isinstance(part, str):
        return TextPart(text=part)
    if isinstance(part, Image):
        return ImagePart(frame=_number(part, frames), **part.says)
    if isinstance(part, Video):
        shown = [
            VideoFrame(frame=_number(one, frames), time_s=time_s, **one.says)
            for one, time_s in zip(part.images, part.times, strict=True)
        ]
        return VideoPart(frames=shown)
    field = f"{field}.content"
    raise InvalidValue(f"{field} must be text, or a list of str, Image and Video", field)


def _number(image: Image, frames: list[Frame]) -> int:
    frames.append(image.frame)
    return len(frames)
