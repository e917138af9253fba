from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import structlog
from msgspec import structs

from hearth.actors.addresses import (
    CONTROL_LIMIT,
    DOOR,
    SCHEDULER,
    SCHEDULER_CONTROL,
    TOKENIZER,
    WORK_LIMIT,
)
from hearth.actors.mailbox import MailboxFull, Receiver, Sender, ZmqContext
from hearth.actors.messages import (
    Cancel,
    ClientGone,
    Convert,
    Converted,
    Deltas,
    DoorMessage,
    ExecutorLost,
    ExecutorReady,
    Failed,
    PromptImage,
    Request,
    RowDelta,
    RowsCut,
    SchedulerControl,
    SchedulerMessage,
    StepOutput,
    TokenizerMessage,
)
from hearth.actors.scheduler.admission import TEXT_ONLY
from hearth.actors.tokenizer.grammar_checker import GrammarChecker
from hearth.actors.tokenizer.prompt_images import PromptImages
from hearth.actors.tokenizer.text_streams import TextStreams, failed_with, joined
from hearth.runtime.config import load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.grammar import (
    ClientGrammar,
    lark_grammar,
    regex_grammar,
    require,
    schema_grammars,
)
from hearth.runtime.request import RowToken
from hearth.runtime.text.conversation import Conversation, has_tools
from hearth.runtime.text.reply_format import ReplyFormat
from hearth.runtime.text.reply_grammar import (
    answer_grammar,
    enforced_schemas,
    reply_grammar,
)
from hearth.runtime.text.tokenizer import EncodedPrompt, Tokenizer

SEND_TIMEOUT_S = 10.0
"""Seconds for which a send to scheduler or front door may wait before it is given up."""
INTAKE_LIMIT = 1024
"""Requests that may wait to be encoded; more are refused with `queue_full`."""
BULK_LIMIT = 64
"""Requests of `_BULK` characters or ids and more that may wait to be encoded."""
_BULK = 16384
# From so many characters or ids on, a worker thread's 0.2 ms cost less than a stalled loop.
_LONG_TEXT = 512
_LONG_IDS = 4096
# Bytes of a picture that are digested in about the time that a character takes.
_HASHED = 64
_log = structlog.get_logger("tokenizer")
T = TypeVar("T")
DoorAnswer = Deltas | Failed | Converted


class _Lane:
    """A queue of requests that are encoded one after another, by turns of their clients.

    At most `limit` wait beside the current one. A full queue takes a request of a client that has
    at least two fewer there than another one, whose newest request is refused instead.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.arrived = anyio.Event()
        self._clients: dict[int, int] = {}
        self._waiting: dict[int, dict[int, Request | Convert]] = {}

    def add(self, message: Request | Convert) -> int | None:
        """Append a request, and wake the reader; the number of one that is refused, or None."""
        refused = None
        if len(self._clients) > self.limit:
            own = len(self._waiting.get(message.client, ()))
            most = max(self._waiting.values(), key=len)
            if len(most) < own + 2:
                return message.rid
            # Never the one that is worked on, which is the first of its client's.
            refused = next(reversed(most))
            self.remove(refused)
        self._clients[message.rid] = message.client
        self._waiting.setdefault(message.client, {})[message.rid] = message
        self.arrived.set()
        return refused

    def first(self) -> Request | Convert | None:
        """The request that is next; it stays until it is removed."""
        requests = next(iter(self._waiting.values()), None)
        return None if requests is None else next(iter(requests.values()))

    def remove(self, rid: int) -> bool:
        """Remove a request; False if it is not here."""
        client = self._clients.pop(rid, None)
        if client is None:
            return False
        del self._waiting[client][rid]
        if not self._waiting[client]:
            del self._waiting[client]
        return True

    def rotate(self, client: int) -> None:
        """Let other clients go before this one."""
        requests = self._waiting.pop(client, None)
        if requests is not None:
            self._waiting[client] = requests


class TokenizerActor:
    """The tokenizer's loop: encodes requests for the scheduler, and detokenizes steps for the door.

    Steps never wait for an encoding, and short texts never for very long ones. A request that is
    cancelled before it has been submitted never is. Changes of rows are passed on to the scheduler
    after their tokens went to the door, and so is the loss of an executor, whose late outputs are
    dropped. The actor owns its mailboxes and `checker`. `ends` are the model's end tokens. `images`
    expands visuals, for a vision model.
    """

    def __init__(
        self,
        *,
        inbox: Receiver[TokenizerMessage],
        to_scheduler: Sender[SchedulerMessage],
        to_scheduler_control: Sender[SchedulerControl],
        to_door: Sender[DoorMessage],
        tokenizer: Tokenizer,
        ends: Collection[int],
        images: PromptImages | None = None,
        checker: GrammarChecker | None = None,
    ) -> None:
        self._inbox = inbox
        self._to_scheduler = to_scheduler
        self._to_scheduler_control = to_scheduler_control
        self._to_door = to_door
        self._tokenizer = tokenizer
        self._images = images
        self._checker = checker or GrammarChecker()
        self._streams = TextStreams(tokenizer, ends)
        self._intake = _Lane(INTAKE_LIMIT)
        self._bulk = _Lane(BULK_LIMIT)
        self._unsent_failures: deque[Failed] = deque()
        # The current executor, None while there is none, and its last output.
        self._executor: int | None = None
        # Tokens of the longest prompt, once that is known.
        self._most_tokens: int | None = None
        self._heard = 0
        self.lost = 0

    @property
    def reply_format(self) -> ReplyFormat:
        """The form of the model's replies."""
        return self._tokenizer.reply_format

    def limit_images(self, most_tokens: int) -> None:
        """Limit the tokens of an image from now on."""
        if self._images is not None:
            self._images.most_tokens = most_tokens

    async def run(self) -> None:
        """Work until cancelled; raises MailboxFull when the scheduler is far behind."""
        with (
            self._inbox,
            self._to_scheduler,
            self._to_scheduler_control,
            self._to_door,
            closing(self._checker),
        ):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen)
                tasks.start_soon(self._prepare, self._intake)
                tasks.start_soon(self._prepare, self._bulk)

    async def _listen(self) -> None:
        while True:
            await self._handle(await self._inbox.receive())

    async def _handle(self, message: TokenizerMessage) -> None:
        match message:
            case StepOutput():
                if self._is_news(message):
                    await self._hear(message)
                    await self._pass_on(message.without_tokens())
            case ExecutorReady(incarnation, limits=limits):
                self._executor, self._heard = incarnation, 0
                self._most_tokens = limits.max_prompt_tokens
                await self._pass_on(message)
            case ExecutorLost():
                self._executor = None
                await self._pass_on(message)
            case ClientGone():
                await self._pass_on(message)
            case _:
                await self._hear(message)

    def _is_news(self, output: StepOutput) -> bool:
        """Record an output's number; False if it comes twice, late or of a lost executor."""
        if output.incarnation != self._executor or output.number <= self._heard:
            return False
        self._heard = output.number
        return True

    async def _pass_on(
        self, told: StepOutput | ExecutorReady | ExecutorLost | ClientGone | None
    ) -> None:
        # Without it the scheduler waits for ever, so a failure here ends the actor.
        if told is not None:
            await self._to_scheduler.send(told, SEND_TIMEOUT_S)

    async def _hear(
        self, message: Request | Convert | Cancel | StepOutput | Failed | RowsCut
    ) -> None:
        try:
            match message:
                case StepOutput():
                    await self._step(message)
                case Failed():
                    await self._rows_failed(message)
                case RowsCut(rids):
                    cut = [row for rid in rids if (row := self._streams.cut(rid)) is not None]
                    await self._answer(Deltas(cut, time.monotonic()))
                case Cancel():
                    await self._cancel(message)
                case Request() | Convert():
                    await self._queue(message)
        except Exception:  # noqa: BLE001 - no message may end the actor
            _log.exception("a message failed", kind=type(message).__name__)

    async def _prepare(self, lane: _Lane) -> None:
        while True:
            lane.arrived = anyio.Event()
            # The first one stays until it is done: a cancel removes it.
            while (message := lane.first()) is not None:
                await self._serve(message, lane)
                lane.remove(message.rid)
                lane.rotate(message.client)
                # Short encodings never wait for anything: steps get their turn in between.
                await anyio.lowlevel.checkpoint()
            await lane.arrived.wait()

    async def _cancel(self, message: Cancel) -> None:
        waited = [lane.remove(message.rid) for lane in (self._intake, self._bulk)]
        self._streams.drop(message.rid)
        if not any(waited):
            await self._to_scheduler.send(message, SEND_TIMEOUT_S)

    async def _queue(self, message: Request | Convert) -> None:
        costly = isinstance(message, Request) and _asked_form(message)
        lane = self._bulk if costly or _size(message) >= _BULK else self._intake
        refused = lane.add(message)
        if refused is not None:
            await self._answer(
                Failed([refused], "queue_full", "too many requests wait: try again later")
            )

    async def _serve(self, message: Request | Convert, lane: _Lane) -> None:
        try:
            if isinstance(message, Request):
                await self._submit(message, lane)
            else:
                await self._convert(message)
        except Exception as error:  # noqa: BLE001 - no request may end the actor
            self._streams.drop(message.rid)
            await self._answer(_as_failed(message.rid, error))

    async def _submit(self, message: Request, lane: _Lane) -> None:
        prompt, images = await self._read(message)
        grammar = await self._grammar(message, in_reasoning=prompt.in_reasoning)
        # From here on a cancel goes behind it.
        if not lane.remove(message.rid):
            return
        if not prompt.ids:
            field = "messages" if message.prompt is None else "prompt"
            raise HearthError("prompt_empty", "the prompt has no tokens: write something", field)
        request = structs.replace(
            message,
            token_ids=prompt.ids,
            encoded=time.monotonic(),
            images=images,
            options=structs.replace(message.options, grammar=grammar),
        )
        # Both before the scheduler knows of it, so that no token can come too early.
        form = _grammar_field(message) if grammar else ""
        for rid in (request.rid, *request.siblings):
            reply = structs.replace(request, rid=rid)
            self._streams.open(reply, in_reasoning=prompt.in_reasoning, form=form)
        await self._to_scheduler.send(_encoded(request), SEND_TIMEOUT_S)

    async def _convert(self, request: Convert) -> None:
        ids = request.tokens
        if ids is None:
            found, _ = await self._read(request)
            await self._answer(Converted(request.rid, tokens=found.ids))
            return
        text = await _run(
            lambda: self._tokenizer.decode(ids, skip_special=False), long=len(ids) >= _LONG_IDS
        )
        await self._answer(Converted(request.rid, text=text))

    async def _read(self, message: Request | Convert) -> tuple[EncodedPrompt, list[PromptImage]]:
        """The prompt of a request, with its images if it is to be submitted."""
        asked = isinstance(message, Request)
        text = message.prompt if isinstance(message, Request) else message.text
        most = self._most_tokens if asked else None
        if text is not None:
            field = "prompt" if asked else "text"
            encode = partial(self._tokenizer.encode, text, field, most)
            return EncodedPrompt(await _run(encode, long=len(text) >= _LONG_TEXT)), []
        conversation, visuals = message.chat or Conversation([]), message.visuals
        turns = conversation.turns
        letters = _letters(conversation)
        long = letters >= _LONG_TEXT or has_tools(conversation)
        if not visuals and not any(turn.parts for turn in turns):
            return await _run(
                lambda: self._tokenizer.encode_chat(conversation, most), long=long
            ), []
        if (images := self._images) is None:
            raise HearthError(TEXT_ONLY.code, TEXT_ONLY.message, TEXT_ONLY.field)
        prompt = await _run(lambda: images.encode(conversation, visuals, most), long=long)
        if isinstance(message, Convert):
            return prompt.encoded, []
        digested = _size(message) - letters
        works = partial(images.works, prompt, visuals)
        return prompt.encoded, await _run(works, long=digested >= _LONG_TEXT)

    async def _grammar(self, request: Request, *, in_reasoning: bool) -> str:
        """The grammar of what a request asks of its reply, checked; "" where that is nothing."""
        if not (field := _asked_form(request)):
            return ""
        require(field)
        for grammar in await _run(partial(_grammars_of, request), long=True):
            await self._checker.check(grammar)
        return await _run(partial(self._compose, request, in_reasoning=in_reasoning), long=True)

    def _compose(self, request: Request, *, in_reasoning: bool) -> str:
        chat, asked = request.chat, request.response_format
        if chat is None:
            return "" if asked is None else answer_grammar(asked)
        return reply_grammar(self._tokenizer, chat, asked, in_reasoning=in_reasoning) or ""

    async def _step(self, step: StepOutput) -> None:
        began = time.monotonic()
        rows: dict[int, RowDelta] = {}
        failures: list[Failed] = []
        for token in step.tokens:
            rid = token.row
            answer = self._streams.take(token)
            if isinstance(answer, RowDelta):
                rows[rid] = joined(rows[rid], answer) if rid in rows else answer
            elif answer is not None:
                failures.append(answer)
            if answer is not None and _ended_here(answer, token):
                await self._leave(rid)
        if rows:
            took = time.monotonic() - began
            texts = list(rows.values())
            await self._answer(
                Deltas(texts, step.ended, step.slot_times, step.rounds, took, step.cached)
            )
        # Behind the text that their own requests may have got in the same step.
        for failure in failures:
            await self._answer(failure)
        for failed in step.failed:
            await self._rows_failed(failed)

    async def _rows_failed(self, message: Failed) -> None:
        told = self._streams.by_field(message)
        for rid in message.rids:
            self._streams.drop(rid)
        for failed in told:
            await self._answer(failed)

    async def _leave(self, rid: int) -> None:
        """Have the executor drop a row that has ended here; if it is not, it only runs in vain."""
        try:
            await self._to_scheduler_control.send(Cancel(rid), SEND_TIMEOUT_S)
        except MailboxFull:
            _log.warning("the scheduler takes no mail", rid=rid)

    async def _answer(self, message: DoorAnswer) -> None:
        try:
            while self._unsent_failures:
                await self._send_oldest_failure()
            await self._to_door.send(message, SEND_TIMEOUT_S)
        except MailboxFull:
            self.lost += 1
            _log.error("the front door takes no mail", dropped=type(message).__name__)
            await self._fail_later(message)

    async def _send_oldest_failure(self) -> None:
        failed = self._unsent_failures.popleft()
        try:
            await self._to_door.send(failed, SEND_TIMEOUT_S)
        except MailboxFull:
            self._unsent_failures.appendleft(failed)
            raise

    async def _fail_later(self, message: DoorAnswer) -> None:
        """Fail the requests of a lost message once the door reads again: text must have no gap."""
        if isinstance(message, Failed):
            self._unsent_failures.append(message)
            return
        rids = [row.rid for row in message.rows] if isinstance(message, Deltas) else [message.rid]
        for rid in rids:
            self._streams.drop(rid)
            self._unsent_failures.append(failed_with(rid, "internal"))
            await self._leave(rid)


def open_tokenizer(
    context: ZmqContext,
    engine: Path,
    socket: str,
    see: Callable[[Tokenizer], PromptImages] | None = None,
    reply_format: str = "",
) -> TokenizerActor:
    """Open the tokenizer of an engine folder and its mailboxes, in the daemon's process.

    Other processes reach it at `socket`; `reply_format` is the setting; `see` makes `PromptImages`
    for a vision model. Raises HearthError for a folder that cannot be read.
    """
    tokenizer = Tokenizer.open(engine, reply_format)
    # Found at its first use: not while clients wait.
    _ = tokenizer.reply_format
    ends = frozenset(load_config(engine).eos_token_ids)
    return TokenizerActor(
        inbox=Receiver(context, [TOKENIZER, socket], TokenizerMessage, WORK_LIMIT),
        to_scheduler=Sender(context, SCHEDULER, WORK_LIMIT),
        to_scheduler_control=Sender(context, SCHEDULER_CONTROL, CONTROL_LIMIT),
        to_door=Sender(context, DOOR, WORK_LIMIT),
        tokenizer=tokenizer,
        ends=ends,
        images=see and see(tokenizer),
    )


def _encoded(request: Request) -> Request:
    """The request as the scheduler gets it."""
    return structs.replace(
        request, chat=None, prompt=None, response_format=None, visuals=[], features=[]
    )


def _size(message: Request | Convert) -> int:
    """Cost of a message, in characters or ids to process."""
    if isinstance(message, Convert) and message.tokens is not None:
        return len(message.tokens)
    text = message.prompt if isinstance(message, Request) else message.text
    if text is not None:
        return len(text)
    size = _letters(message.chat or Conversation([]))
    if isinstance(message, Request):
        # A digest of their bytes is made.
        frames = (frame for visual in message.visuals for frame in visual.frames)
        size += sum(frame.slot.size for frame in frames) // _HASHED
    return size


def _asked_form(request: Request) -> str:
    """The field that asks for what a grammar has to enforce; "" where none does."""
    chat = request.chat or Conversation([])
    fields = {
        "response_format": request.response_format is not None,
        "tool_choice": chat.tool_choice not in {"none", "auto"},
        "reasoning_budget": chat.reasoning_budget is not None,
        "tools": enforced_schemas(chat),
    }
    return next((name for name, asked in fields.items() if asked), "")


def _grammar_field(request: Request) -> str:
    """The field that a grammar which the model cannot follow is told by.

    Others were compiled before: a Lark text alone may name what this model has not.
    """
    asked, schemas = request.response_format, enforced_schemas(request.chat or Conversation([]))
    if asked is not None and (asked.kind == "lark" or not schemas):
        named = {"lark": ".grammar", "regex": ".regex", "json_schema": ".schema"}
        return f"response_format{named.get(asked.kind, '')}"
    return next(iter(schemas), _asked_form(request))


def _grammars_of(request: Request) -> list[ClientGrammar]:
    """The grammars that clients wrote into a request, to be checked before it is accepted."""
    chat, asked = request.chat, request.response_format
    found = schema_grammars(enforced_schemas(chat or Conversation([]), asked))
    if asked is not None and asked.kind == "regex":
        found.append(regex_grammar(asked.grammar, "response_format.regex"))
    if asked is not None and asked.kind == "lark":
        found.append(lark_grammar(asked.grammar, "response_format.grammar"))
    return found


def _letters(chat: Conversation) -> int:
    if has_tools(chat):
        return len(msgspec.msgpack.encode(chat))
    turns = chat.turns
    return sum(len(turn.content) + sum(len(part.text) for part in turn.parts) for turn in turns)


async def _run(work: Callable[[], T], *, long: bool) -> T:
    return await anyio.to_thread.run_sync(work) if long else work()


def _as_failed(rid: int, error: Exception) -> Failed:
    if isinstance(error, MailboxFull):
        _log.warning("the scheduler takes no mail", rid=rid)
        return Failed([rid], error.code, "the scheduler is behind: try again later")
    if isinstance(error, HearthError):
        return Failed([rid], error.code, error.message, error.field)
    _log.error("a request could not be prepared", rid=rid, exc_info=error)
    return failed_with(rid, "internal")


def _ended_here(answer: RowDelta | Failed, token: RowToken) -> bool:
    """True if the request ended with this token although the executor goes on with the row."""
    ended = isinstance(answer, Failed) or answer.finish is not None
    return ended and token.finish is None and token.error is None
