"""The wire structs of Hearth, protocol 1: maps with string keys and the tag `t`.

`clients/PROTOCOL.md` is the specification; this module is its one definition in Python.
Requests refuse unknown fields (an option is honoured or refused); answers ignore them, so that
an older client reads a newer server.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

PROTOCOL = 1
MAX_FRAME_BYTES = 1 << 20
"""Bytes of one message frame; larger ones are refused before they are decoded."""
MAX_MESSAGES = 256
"""Turns of one conversation."""
MAX_TOOLS = 128
"""Tools of one request, and calls of one turn."""

Id = Annotated[str, Meta(min_length=1, max_length=64)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
ToolName = Annotated[str, Meta(min_length=1, max_length=128)]
CallId = Annotated[str, Meta(min_length=1, max_length=128)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
Reason = Literal["stop", "length", "cancelled", "tool_calls"]
Text = Annotated[str, Meta(max_length=1 << 20)]
GrammarText = Annotated[str, Meta(min_length=1, max_length=1 << 16)]
Variable = bool | int | float | Annotated[str, Meta(max_length=4096)] | None
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
FileFormat = Literal["jpeg", "png", "webp", "gif"]
RawEncoding = Literal[
    "rgb8",
    "bgr8",
    "rgba8",
    "bgra8",
    "mono8",
    "8UC1",
    "8UC3",
    "8UC4",
    "bayer_rggb8",
    "bayer_bggr8",
    "bayer_gbrg8",
    "bayer_grbg8",
    "yuv422",
    "uyvy",
    "yuv422_yuy2",
    "yuyv",
    "nv12",
]
Side = Annotated[int, Meta(ge=1, le=65535)]


class Request(
    msgspec.Struct, tag_field="t", kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A message from client to server."""


class Answer(msgspec.Struct, tag_field="t", kw_only=True, omit_defaults=True):
    """A message from server to client."""


class Hello(Request, tag="hello"):
    """The first message: protocol numbers that the client speaks, best first.

    `features` are what the client reads beyond the first version; a server ignores other names.
    """

    proto: Annotated[list[int], Meta(min_length=1, max_length=16)]
    client: Annotated[str, Meta(max_length=128)] = ""
    lease_s: Annotated[float, Meta(ge=1.0, le=3600.0)] | None = None
    status_only: bool = False
    features: Annotated[list[Name], Meta(max_length=64)] = []


class Part(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A piece of a turn."""


class TextPart(Part, tag_field="type", tag="text", gc=False):
    """Text among pictures."""

    text: Text


class Picture(Part, gc=False):
    """A picture in a further frame of the message, counted from 1: a file or raw pixels.

    A file has a `format`. Raw pixels have an `encoding`, `width`, `height`, and as `step` the bytes
    from one row to the next, by default without any between them.
    """

    frame: Annotated[int, Meta(ge=1, le=4096)]
    format: FileFormat | None = None
    encoding: RawEncoding | None = None
    width: Side | None = None
    height: Side | None = None
    step: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class ImagePart(Picture, tag_field="type", tag="image", gc=False):
    """A picture in a turn."""


class VideoFrame(Picture, kw_only=True, gc=False):
    """A picture of a video, and its time in seconds."""

    time_s: Annotated[float, Meta(ge=0.0, le=1e6)]


class VideoPart(Part, tag_field="type", tag="video"):
    """A video in a turn: its pictures in order."""

    frames: Annotated[list[VideoFrame], Meta(min_length=1, max_length=4096)]


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A call of a tool by the model, as it stands in a turn; its result gives the `id` again."""

    id: CallId
    name: ToolName
    arguments: dict[str, Any] = {}


class Message(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One turn of a conversation: text, or parts in their order.

    Turns of the assistant may have `reasoning` and `tool_calls`, then also without content. A turn
    of a tool has the `tool_call_id` that it answers.
    """

    role: Role
    content: (
        Text
        | Annotated[list[TextPart | ImagePart | VideoPart], Meta(min_length=1, max_length=256)]
        | None
    ) = None
    reasoning: Text = ""
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] = []
    tool_call_id: CallId | None = None
    name: ToolName | None = None


class Tool(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tool that the model may call; `parameters` is a JSON schema of its arguments.

    With `strict` they follow it also where the model chooses by itself to call.
    """

    name: ToolName
    description: Annotated[str, Meta(max_length=1 << 16)] = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The one tool that has to be called."""

    name: ToolName


class Format(msgspec.Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """A form that the answer must have."""


class JsonObject(Format, tag="json_object"):
    """Any JSON object."""


class JsonSchema(Format, tag="json_schema"):
    """JSON by a schema."""

    schema: dict[str, Any] | bool


class Regex(Format, tag="regex"):
    """Text that all of a regular expression matches."""

    regex: GrammarText


class Lark(Format, tag="lark"):
    """Text by a grammar in the Lark notation."""

    grammar: GrammarText


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
Variables = Annotated[dict[Name, Variable], Meta(max_length=32)]


class Generate(Request, tag="generate"):
    """Ask for text: `messages` (chat template applied) or a raw `prompt`, exactly one of them.

    Options of sampling that are None have the model's own value for clients with the feature
    `generation_defaults`, and those of `clients/PROTOCOL.md` for others.
    """

    id: Id
    messages: Messages | None = None
    prompt: Text | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        list[tuple[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]]], Meta(max_length=1024)
    ] = []
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)
    ] = []
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    ignore_eos: bool = False
    priority: Annotated[int, Meta(ge=-10, le=10)] = 0
    deadline_s: Annotated[float, Meta(gt=0.0, le=86400.0)] | None = None
    timestamps: bool = False
    speculation: bool | None = None
    adapter: Annotated[str, Meta(max_length=64)] = ""
    cache: Literal["use", "bypass", "pin"] = "use"
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    traceparent: Annotated[str, Meta(max_length=256)] | None = None
    tools: Tools = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    template: Variables = {}
    response_format: JsonObject | JsonSchema | Regex | Lark | None = None
    reasoning_budget: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    n: Annotated[int, Meta(ge=1, le=8)] = 1


class Cancel(Request, tag="cancel"):
    """End generation `id`, which answers `done` (`cancelled`); an unknown id is ignored."""

    id: Id


class Tokenize(Request, tag="tokenize"):
    """Ask for the token ids of `text`, or of `messages` with the chat template applied."""

    id: Id
    text: Text | None = None
    messages: Messages | None = None
    tools: Tools = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    template: Variables = {}


class Detokenize(Request, tag="detokenize"):
    """Ask for the text of token ids."""

    id: Id
    tokens: Annotated[list[TokenId], Meta(max_length=65536)]


class Status(Request, tag="status"):
    """Ask what the daemon serves and does."""

    id: Id


class Lease(Request, tag="lease"):
    """Renew the session; every other message renews it too."""


class Bye(Request, tag="bye"):
    """End the session; what is open in it is cancelled and nothing is answered."""


ClientMessage = Hello | Generate | Cancel | Tokenize | Detokenize | Status | Lease | Bye


class Limits(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Limits of the server; sizes in bytes, lengths in tokens, times in seconds.

    `images` counts the pictures of one request, those of videos among them; 0 where the model sees
    none. Each has `image_bytes` at most, all of them `request_image_bytes`. `image_tokens` is what
    one becomes at most: larger ones are made smaller.
    """

    frame_bytes: int
    frames: int
    requests_per_client: int
    prompt_tokens: int
    total_tokens: int
    queued_requests: int
    queued_tokens: int
    lease_s: float
    images: int = 0
    image_bytes: int = 0
    request_image_bytes: int = 0
    image_tokens: int = 0


class Welcome(Answer, tag="welcome"):
    """The answer to `hello`: the protocol chosen, limits and features by name.

    `epoch` names this run of the server: another one means that it was restarted. `adapters` are
    the names that a request may give as its adapter. `tool_format` names the form in which the
    model calls tools, `hearth` where the server describes a form of its own to it.
    """

    proto: int
    server: str
    limits: Limits
    features: list[str] = []
    model: str = ""
    epoch: str = ""
    adapters: list[str] = []
    tool_format: str = ""


class Leased(Answer, tag="leased"):
    """The lease was renewed for `seconds`."""

    seconds: float


class Accepted(Answer, tag="accepted"):
    """The request is in the queue; `prompt_tokens` is its length.

    `request` is its id in the whole daemon, the one that logs and traces have.
    """

    id: str
    prompt_tokens: int
    request: str = ""


class TokenLogprob(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The chosen token's log probability and the most likely alternatives as (id, logprob).

    `token_bytes` and `top_bytes` are theirs, for clients with the feature `token_bytes`.
    """

    logprob: float
    top: list[tuple[int, float]] = []
    token_bytes: bytes = b""
    top_bytes: list[bytes] = []


class CallPiece(msgspec.Struct, kw_only=True, omit_defaults=True):
    """More of call `index` of a turn: `id` and `name` in its first piece, then JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(Answer, tag="delta"):
    """More of the reply to request `id`; `seq` counts from 0 without gaps.

    `reasoning` and `tool_calls` come for clients that have these features. `choice` tells the
    replies of a request for several apart. `ended` comes when the request set `timestamps`: when
    the engine step of the last token here ended, in seconds of the system-wide monotonic clock.
    """

    id: str
    seq: int
    text: str
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    ended: float | None = None
    reasoning: str = ""
    tool_calls: list[CallPiece] = []
    choice: int = 0


class Usage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Counts in tokens, times in milliseconds; `cached_tokens` of the prompt were not computed.

    `reasoning_tokens` are those of the completion that are reasoning, with the feature.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class Speculation(msgspec.Struct, kw_only=True):
    """A reply's rounds of speculation: `accepted` tokens came from them, of `drafted` proposals.

    `accept_length` is the tokens a round, at least 1.
    """

    rounds: int
    drafted: int
    accepted: int
    accept_length: float


class ImageUsage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request's images and videos, and the prompt's tokens that they are; times in milliseconds.

    `cached` of them were there from before, the others took the times by stage. `tokens` is 0 where
    the request ended before they were seen. `sizes` are width and height in pixels of each as the
    model saw it, in their order.
    """

    count: int
    tokens: int
    cached: int = 0
    sizes: list[tuple[int, int]] = []
    decode_ms: float = 0.0
    resize_ms: float = 0.0
    engine_ms: float = 0.0


class Ended(msgspec.Struct, kw_only=True, omit_defaults=True):
    """End of one of several replies; `stop` is the stop string that ended it."""

    reason: str
    completion_tokens: int
    stop: str = ""


class Done(Answer, tag="done"):
    """The request ended as asked; `speculation` is set for a reply that took part in rounds.

    `images` is set where there were some. `reason` is one of Reason, or a reason of a newer server.
    `stop` is the stop string that ended the reply, for clients with the feature `end_details`.
    Of several replies `choices` tells the end of each, `reason` and `stop` that of the first.
    """

    id: str
    reason: str
    usage: Usage
    speculation: Speculation | None = None
    images: ImageUsage | None = None
    stop: str = ""
    choices: list[Ended] = []


class Error(Answer, tag="error"):
    """The request `id` failed and nothing follows for it; an empty `id` ends no request.

    `retry_after_s` comes where waiting helps: after so many seconds a place should be free. `usage`
    of a generation that was accepted comes for clients with the feature `end_details`.
    """

    code: str
    message: str
    id: str = ""
    field: str = ""
    retry_after_s: float | None = None
    usage: Usage | None = None


class Tokens(Answer, tag="tokens"):
    """The answer to `tokenize`."""

    id: str
    tokens: list[int]


class Detokenized(Answer, tag="text"):
    """The answer to `detokenize`."""

    id: str
    text: str


class StageReport(msgspec.Struct, kw_only=True):
    """Figures of one kind of engine step.

    `tokens` of a prefill were computed, those of a generation were given to replies, behind the
    first token of each.
    """

    steps: int
    tokens: int
    seconds: float


class PrefixReport(msgspec.Struct, kw_only=True):
    """Figures of the prefix cache: of `rows` that were looked up `hits` found something.

    They had `queried` tokens, of which `reused` were not computed again. `bytes` are by tier.
    """

    rows: int
    hits: int
    queried: int
    reused: int
    bytes: dict[str, int] = {}


class SpeculationReport(Speculation, kw_only=True):
    """Figures of speculation for all replies.

    `steps` are verifications of a batch, `rounds` those of a reply; `accepted_by_position[i]`
    counts the rounds that gave more than i tokens.
    """

    steps: int
    accepted_by_position: list[int]
    draft_s: float
    verify_s: float
    commit_s: float


class ImagesReport(msgspec.Struct, kw_only=True):
    """Figures of images in the engine's process: `images` went into prompts, as `tokens`.

    Those of a reply that was put back went in again. `encoded` ones went through a vision tower of
    that process, as on GPUs; the encoder's are none of them.
    """

    images: int
    tokens: int
    merge_seconds: float
    encoded: int
    encode_seconds: float


class ExecutorReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Figures of the engine's process since it started.

    The replies that run have `adapter`, "" for none; it was switched `switches` times.
    """

    prefill: StageReport
    generation: StageReport
    speculation: SpeculationReport | None = None
    prefix: PrefixReport | None = None
    adapter: str = ""
    switches: int = 0
    images: ImagesReport | None = None


class StatusReport(Answer, tag="status_report"):
    """The answer to `status`: counts now and totals since the start."""

    id: str
    server: str
    model: str
    state: str
    uptime_s: float
    clients: int
    running: int
    queued: int
    queued_tokens: int
    places: int = 0
    totals: dict[str, int] = {}
    engine: dict[str, str | int | float] = {}
    executor: ExecutorReport | None = None
    stage: str = ""
    share: float | None = None
    reason: str = ""
    adapters: list[str] = []


ServerMessage = (
    Welcome | Leased | Accepted | Delta | Done | Error | Tokens | Detokenized | StatusReport
)
