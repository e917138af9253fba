"""Messages between actors: shared ones first, then a section for each inbox, its union last.

`rid` is the front door's number for a request: unique and increasing for the daemon's life.
Times are seconds of the system-wide monotonic clock, so they compare across processes.
Control messages travel on a socket of their own and never wait behind work.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from hearth.actors.settings import Level
from hearth.runtime.images import ImageLayout, ImageSpan, Picture, Slot
from hearth.runtime.request import FinishReason, RequestOptions, RowRequest, RowRound, RowToken
from hearth.runtime.text.conversation import Conversation, ResponseFormat
from hearth.runtime.text.reply_parser import CallPiece


class ActorMessage(msgspec.Struct, tag_field="t", array_like=True, omit_defaults=True):
    """A message between actors: positional, because both ends are always of one version."""


# --- parts of messages --------------------------------------------------------------------


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """A picture that a client has sent, and the arena slot of its bytes."""

    picture: Picture
    slot: Slot


class Visual(msgspec.Struct, frozen=True, array_like=True):
    """An image, or a video: frames in order and the time of each in seconds."""

    frames: list[ImageInput]
    times: list[float] = []


class ImageWork(msgspec.Struct, frozen=True, array_like=True):
    """A visual to encode, with its layout; `key` is equal for equal embeddings."""

    key: bytes
    visual: Visual
    layout: ImageLayout


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """A visual of a prompt, and the spans of its placeholder tokens."""

    work: ImageWork
    spans: tuple[ImageSpan, ...]


class ImageTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a visual took by stage."""

    decode_s: float = 0.0
    resize_s: float = 0.0
    engine_s: float = 0.0


Limit = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class ExecutorLimits(msgspec.Struct, frozen=True, array_like=True):
    """Limits of a loaded executor: rows at a time, and tokens per row."""

    max_batch: Limit
    max_prompt_tokens: Limit
    max_total_tokens: Limit


# --- to more than one inbox ---------------------------------------------------------------


class Request(ActorMessage, tag="request"):
    """A request for text: its prompt, options for the runtime, priority and deadline.

    The front door gives it either a `chat` or a `prompt`, which the tokenizer has replaced by
    `token_ids` and `images` at `encoded`, and what `chat` and `response_format` ask of the answer
    by a grammar of `options`. Images are encoded once the scheduler has admitted it.

    A higher `priority` goes first; `deadline` is in seconds of the monotonic clock. Requests of one
    `client` take turns with those of others. `features` are what the client reads of a reply.
    `siblings` are the numbers of further replies to the prompt, which the scheduler queues as
    requests of their own once this one has its first token.
    """

    rid: int
    options: RequestOptions = RequestOptions()
    priority: int = 0
    deadline: Annotated[float, Meta(ge=0.0)] | None = None
    client: int = 0
    chat: Conversation | None = None
    prompt: str | None = None
    response_format: ResponseFormat | None = None
    features: list[str] = []
    siblings: list[int] = []
    visuals: list[Visual] = []
    token_ids: list[int] = []
    encoded: float = 0.0
    images: list[PromptImage] = []


class Cancel(ActorMessage, tag="cancel"):
    """Drop request `rid` wherever it is; unknown ids are ignored."""

    rid: int


class Failed(ActorMessage, tag="failed"):
    """Requests ended in a failure; `code` is one of `hearth.runtime.errors.CODES`.

    If the queue is full, `ahead` is the number of requests that have to leave it first.
    """

    rids: list[int]
    code: str
    message: str
    field: str | None = None
    ahead: int = 0


class Encoded(ActorMessage, tag="encoded"):
    """The embeddings of a piece of work are in their slot, after `times` at the sender."""

    number: int
    times: ImageTimes


class EncodeFailed(ActorMessage, tag="encode_failed"):
    """A piece of work has failed, with one of the codes of errors."""

    number: int
    code: str
    message: str


class StepOutput(ActorMessage, tag="step_output"):
    """Changes of one executor's rows in one step, or between two steps if rows change there.

    Each must arrive once and in order: `number` counts them from 1, and readers drop doubled and
    late ones by it. `seq` is the newest `Schedule` that the executor has seen: rows without slots
    that it does not offer have left.

    `tokens` are those of a step that ended at `ended`; a round of speculation gives a request
    several, in order, and `rounds` has its figures. Both name the request's number as row.
    `placed` rows take part from the next step on. `slot_times` has the rows that got their first
    tokens, with the times at which they had got their slots; `cached` tokens of their prompts came
    from the prefix cache. `finished` rows ended with a token of this step; `preempted` rows have
    left with all tokens that they had generated. `missing` rows are offered, but their requests
    have not come. A `retiring` executor has given up all rows without slots.
    """

    incarnation: int
    number: int
    seq: int
    tokens: list[RowToken] = []
    ended: float = 0.0
    placed: list[int] = []
    slot_times: dict[int, float] = {}
    finished: list[int] = []
    preempted: dict[int, list[int]] = {}
    failed: list[Failed] = []
    missing: list[int] = []
    images: list[Encoded | EncodeFailed] = []
    retiring: bool = False
    rounds: list[RowRound] = []
    cached: dict[int, int] = {}

    def without_tokens(self) -> "StepOutput | None":
        """Return a copy without tokens for the scheduler; None if it has nothing but tokens."""
        changed = self.slot_times or self.finished or self.failed or self.images
        if self.tokens and not changed:
            return None
        return msgspec.structs.replace(self, tokens=[], rounds=[], cached={})


class ExecutorReady(ActorMessage, tag="executor_ready"):
    """An executor listens at `work`; any earlier one is gone, and its late outputs are dropped.

    The tokenizer passes it on to the scheduler, as it does `ExecutorLost`, so that it follows all
    outputs of the earlier executor.
    """

    incarnation: int
    work: str
    limits: ExecutorLimits


class ExecutorLost(ActorMessage, tag="executor_lost"):
    """The executor died: rows with slots have failed, and offered rows are queued again.

    All of them are suspects of its death, unless it is `blameless`.
    """

    reason: str
    blameless: bool = False


class ClientGone(ActorMessage, tag="client_gone"):
    """The session of this client has ended: its pins in the prefix cache are released.

    The tokenizer passes it on to the scheduler, so that it follows all requests of the client.
    """

    client: int


class SetLogLevel(ActorMessage, tag="set_log_level"):
    """Log events of this level and above from now on."""

    level: Level


class Shutdown(ActorMessage, tag="shutdown"):
    """End after the current step; running rows fail with `shutting_down`.

    With `after_rows` end once the running rows have ended, as another executor takes over: give up
    the rows without slots, place no row any more, and say so in the outputs.
    """

    after_rows: bool = False


# --- to the tokenizer ---------------------------------------------------------------------


class Convert(ActorMessage, tag="convert"):
    """Tokenize text or a conversation, or detokenize ids, outside any generation.

    Clients take turns by their numbers `client`.
    """

    rid: int
    text: str | None = None
    chat: Conversation | None = None
    tokens: list[int] | None = None
    visuals: list[Visual] = []
    client: int = 0


class RowsCut(ActorMessage, tag="rows_cut"):
    """Requests end with the tokens they have: the new executor's limits are lower."""

    rids: list[int]


TokenizerMessage = (
    Request
    | Convert
    | Cancel
    | StepOutput
    | Failed
    | RowsCut
    | ExecutorReady
    | ExecutorLost
    | ClientGone
)


# --- to the scheduler ---------------------------------------------------------------------


class AskReport(ActorMessage, tag="ask_report"):
    """Report the queue to the front door's `rid`."""

    rid: int


class Patched(ActorMessage, tag="patched"):
    """The patches of a piece of work are in their slot, for the executor's vision encoder."""

    number: int
    times: ImageTimes


class AdapterGone(ActorMessage, tag="adapter_gone"):
    """The adapter was removed: requests that wait for it fail."""

    name: str


class EncoderReady(ActorMessage, tag="encoder_ready"):
    """An encoder listens at `work`; any earlier one is gone."""

    work: str


class EncoderLost(ActorMessage, tag="encoder_lost"):
    """The encoder died: its work has failed."""

    reason: str


SchedulerMessage = (
    Request
    | Cancel
    | StepOutput
    | ExecutorReady
    | ExecutorLost
    | AskReport
    | ClientGone
    | Patched
    | Encoded
    | EncodeFailed
)
SchedulerControl = Cancel | AdapterGone | EncoderReady | EncoderLost


# --- to an executor -----------------------------------------------------------------------


class Schedule(ActorMessage, tag="schedule"):
    """The whole schedule of one executor's rows; of two the one with the higher `seq` counts.

    The offered `rows` get slots in this order as soon as slots are free. `new` has the request of
    a row once, and again if the executor misses it. A row without a slot that is not among `rows`
    is given up. Rows with slots go on, except for `cancelled` ones, which are dropped, and for
    `preempted` and `urgent` ones, which leave with the tokens that they have generated: the first
    once they have decoded for as long as their prefill took, the second at once. The scheduler has
    heard all outputs up to number `heard`.
    """

    incarnation: int
    seq: int
    heard: int
    rows: list[int] = msgspec.field(default_factory=list)
    new: dict[int, RowRequest] = msgspec.field(default_factory=dict)
    preempted: list[int] = msgspec.field(default_factory=list)
    urgent: list[int] = msgspec.field(default_factory=list)
    cancelled: list[int] = msgspec.field(default_factory=list)


class RunVisionEncoder(ActorMessage, tag="run_vision_encoder"):
    """Make embeddings of patches, between two steps; `StepOutput.images` answers."""

    number: int
    layout: ImageLayout
    patches: Slot
    target: Slot


class Unpin(ActorMessage, tag="unpin"):
    """Release the pages that this client's rows have pinned: its session has ended.

    Its rows have ended before, or an earlier `Schedule` cancels them.
    """

    client: int


class SetAdapter(ActorMessage, tag="set_adapter"):
    """Load an adapter from `folder`, an absolute path, or unload it if that is None.

    Rows that have an unloaded adapter, or wait for it, fail with `adapter_unknown`.
    """

    name: str
    folder: str | None


ExecutorMessage = Schedule | RunVisionEncoder | Unpin
ExecutorControl = SetAdapter | SetLogLevel | Shutdown


# --- to the encoder -----------------------------------------------------------------------


class Encode(ActorMessage, tag="encode"):
    """Write a visual's patches to `patches`; if the encoder runs the model, embeddings to `target`.

    One `Patched`, `Encoded` or `EncodeFailed` answers it.
    """

    number: int
    work: ImageWork
    patches: Slot
    target: Slot


class DropWork(ActorMessage, tag="drop_work"):
    """Drop pieces of work that no request needs any more; unbegun ones fail with `cancelled`."""

    numbers: list[int]


EncoderMessage = Encode | DropWork


EncoderControl = SetLogLevel | Shutdown


# --- to the front door --------------------------------------------------------------------

ReplyEnd = FinishReason | Literal["tool_calls"]


class Accepted(ActorMessage, tag="accepted"):
    """The scheduler has queued the request; see `Request`."""

    rid: int
    prompt_tokens: int
    encoded: float = 0.0


class Embedded(ActorMessage, tag="embedded"):
    """The embeddings of all visuals of a request are ready; it is queued after this message.

    They take `tokens` tokens. `cached` of the visuals were ready before; the others took `times` in
    all. `sizes` are width and height in pixels of each visual, as the model gets it.
    """

    rid: int
    tokens: int
    cached: int
    times: ImageTimes
    sizes: list[tuple[int, int]] = []


class RowDelta(msgspec.Struct, array_like=True, omit_defaults=True):
    """New text and tokens of one request; `finish` ends it, at `stop_string` if there is one.

    `reasoning_tokens` of them are of reasoning and its marks, where the client reads it apart.
    `spellings` are the bytes of the token and of each alternative of `logprobs`, where asked for.
    """

    rid: int
    text: str
    tokens: list[int]
    logprobs: list[RowToken] = []
    finish: ReplyEnd | None = None
    reasoning: str = ""
    calls: list[CallPiece] = []
    stop_string: str = ""
    spellings: list[list[bytes]] = []
    reasoning_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse, in a decoder too, spellings of other tokens than those of `logprobs`."""
        if self.spellings and len(self.spellings) != len(self.logprobs):
            raise ValueError("each logprob has one spelling")


class Deltas(ActorMessage, tag="deltas"):
    """Text of one engine step, one row a request; see `StepOutput`.

    All rows waited `detokenize_s` seconds for their text.
    """

    rows: list[RowDelta]
    ended: float
    slot_times: dict[int, float] = {}
    rounds: list[RowRound] = []
    detokenize_s: float = 0.0
    cached: dict[int, int] = {}


class Converted(ActorMessage, tag="converted"):
    """The answer to `Convert`: ids for text, text for ids."""

    rid: int
    tokens: list[int] | None = None
    text: str | None = None


class SchedulerReport(ActorMessage, tag="scheduler_report"):
    """State of the scheduler now, and its counters since the start.

    `running` of `places` slots are taken; `rows` counts the rows that ever got a slot. `embeddings`
    is the number of bytes that embeddings of images take; None for a model without vision.
    """

    rid: int
    running: int
    places: int
    queued: int
    queued_tokens: int
    rows: int
    requeued: int
    refused: int
    embeddings: int | None = None


DoorMessage = Accepted | Embedded | Deltas | Failed | Converted | SchedulerReport
