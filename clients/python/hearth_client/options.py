"""Arguments of `generate`: options as keywords, and a conversation with its pictures."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, TypedDict

from hearth_client.errors import InvalidValue, UnsupportedOption
from hearth_client.pictures import Frame, Image, Video
from hearth_client.protocol import (
    Format,
    Generate,
    ImagePart,
    Message,
    NamedTool,
    TextPart,
    Tokenize,
    Tool,
    Variable,
    VideoFrame,
    VideoPart,
)

Turns: TypeAlias = Sequence[Message | Mapping[str, Any]]
"""A conversation: `Message` structs, or mappings with the names of their fields.

Content is text, or a list of texts, images and videos in their order. A call in `tool_calls` is a
`ToolCall` or a mapping likewise.
"""

_ELSEWHERE = {"timeout": "deadline_s", "num_predict": "max_tokens", "stop_sequences": "stop"}
"""Names of options in other libraries, where they differ."""


class ChatOptions(TypedDict, total=False):
    """Options of a conversation, each by its name; one that is left out has its default.

    tools: those that the model may call, `Tool` structs or mappings of their fields.
    tool_choice: "auto" (the default), "none", "required", or {"name": ...} of the one to call.
    parallel_tool_calls: several calls in a turn; default True.
    template: variables of the chat template, {"enable_thinking": False} for instance.
    """

    tools: Sequence[Tool | Mapping[str, Any]]
    tool_choice: Literal["none", "auto", "required"] | NamedTool | Mapping[str, str]
    parallel_tool_calls: bool
    template: Mapping[str, Variable]


class GenerateOptions(ChatOptions, total=False):
    """Options of `generate`, each by its name; one that is left out has its default.

    Those of `ChatOptions` go with messages. The default of an option of sampling is the model's own
    where the client has the feature "generation_defaults".

    max_tokens: most tokens of the reply, 1 or more; default what fits.
    temperature: 0 to 100; 0, the default, always takes the most likely token.
    top_k: the most likely tokens to choose from; default 0, all.
    top_p: above 0 to 1, the likeliest tokens that make up this probability; default 1.
    min_p: 0 to 1, tokens with at least this share of the best one's probability; default 0.
    repetition_penalty: 0.01 to 100, divides the scores of tokens seen before; default 1.
    presence_penalty, frequency_penalty: -2 to 2, lower the scores of generated tokens; default 0.
    logit_bias: pairs of a token id and -100 to 100 to add to its score; at most 1,024.
    seed: same seed, same text; default another one each time.
    stop: a text, or up to 16 of them, before which the reply ends.
    logprobs: 0 to 20 likely alternatives to report for each token; default no log probabilities.
    ignore_eos: go on after an end token; default False.
    priority: -10 to 10, higher ones first; default 0.
    deadline_s: seconds after which DeadlineExceeded is raised, with the text so far; default none.
    timestamps: tell when the step of each delta ended; default False.
    speculation: try several tokens a step, or never; default where it is measured to be faster.
    adapter: the name of the adapter that answers; default none.
    cache: "use" the prefix cache (the default), "bypass" it, or "pin" the prompt in it.
    cache_salt: a text; only requests with the same one share a prefix of this; default none.
    traceparent: W3C Trace Context of the span that asks; default none.
    response_format: a form that the answer must have, {"type": "json_schema", "schema": {...}}, or
        of type "json_object", "regex" (with `regex`) or "lark" (with `grammar`); default none.
    reasoning_budget: most tokens of reasoning; default as many as the model takes.
    n: replies to one prompt, 1 to 8; default 1.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Sequence[tuple[int, float]]
    seed: int | None
    stop: str | Sequence[str]
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
    response_format: Format | Mapping[str, Any] | None
    reasoning_budget: int | None
    n: int


def generate_request(
    request_id: str, prompt: str | None, messages: list[Message] | None, options: Mapping[str, Any]
) -> Generate:
    """Build the message; values are checked by the server, which names the field at fault."""
    for name in options:
        if name not in GenerateOptions.__annotations__:
            raise UnsupportedOption(f"{name} is not an option of generate{_nearest(name)}", name)
    if (prompt is None) == (messages is None):
        raise InvalidValue("generate needs a prompt or messages, exactly one of them", "prompt")
    if isinstance(options.get("stop"), str):
        options = {**options, "stop": [options["stop"]]}
    return Generate(id=request_id, prompt=prompt, messages=messages, **options)


def tokenize_request(
    request_id: str, text: str | None, messages: list[Message] | None, options: Mapping[str, Any]
) -> Tokenize:
    """Build the message; values are checked by the server, which names the field at fault."""
    for name in options:
        if name not in ChatOptions.__annotations__:
            raise UnsupportedOption(f"{name} is not an option of tokenize", name)
    return Tokenize(id=request_id, text=text, messages=messages, **options)


def _nearest(name: str) -> str:
    """`` (nearest: max_tokens)`` for what is nearly an option, or is one elsewhere."""
    near = get_close_matches(name, GenerateOptions.__annotations__, n=1)
    near = [_ELSEWHERE[name]] if name in _ELSEWHERE else near
    return f" (nearest: {near[0]})" if near else ""


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
    for name in turn:
        if name not in Message.__struct_fields__:
            raise UnsupportedOption(f"{field} has no field {name}", field)
    if "role" not in turn or not (turn.get("content") is not None or turn.get("tool_calls")):
        raise InvalidValue(f"{field} must have role, and content or tool_calls", field)
    content = turn.get("content")
    if isinstance(content, (list, tuple)):
        content = [_part(one, field, frames) for one in content]
    # What else is no text the server refuses by name.
    return Message(**{**turn, "content": content})


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
