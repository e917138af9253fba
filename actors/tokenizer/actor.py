from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
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
    ChatTurn,
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
from hearth.actors.tokenizer.prompt_images import PromptImages
from hearth.runtime.errors import HearthError
from hearth.runtime.request import FinishReason, RowToken
from hearth.runtime.text import TextStream, Tokenizer

_INTERNAL = "this request met a fault of the daemon, written to its log: send it again"
_SENTENCES = {
    "non_finite": "the model computed values that are not finite for this request: change it, "
    "and export the model again if others fail too",
}


class TextStreams:
    """The text of every open request: tokens in, messages out, no sockets."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._open: dict[int, TextStream] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: Request) -> None:
        """Begin the text of a request; raises `invalid_value` for an empty stop string."""
        self._open[request.rid] = TextStream(self._tokenizer, request.options.stop)

    def drop(self, rid: int) -> None:
        """Forget a request; unknown ones are ignored."""
        self._open.pop(rid, None)

    def take(self, token: RowToken) -> RowDelta | Failed | None:
        """Turn one token into a delta or a failure; None for a request that is not open.

        A request that ends with the token, in text or failure, is forgotten.
        """
        rid = token.row
        stream = self._open.get(rid)
        if stream is None:
            return None
        try:
            answer = failed_with(rid, token.error) if token.error else _delta(stream, token)
        except Exception:  # noqa: BLE001 - no row may take the others with it
            _log.exception("a token could not be turned into text", rid=rid)
            answer = failed_with(rid, "internal")
        if isinstance(answer, Failed) or answer.finish is not None:
            self.drop(rid)
        return answer

    def cut(self, rid: int) -> RowDelta | None:
        """The last delta of a request that gets no more tokens; None if it is not open."""
        stream = self._open.pop(rid, None)
        return None if stream is None else RowDelta(rid, stream.finish(), [], finish="length")


def failed_with(rid: int, code: str) -> Failed:
    """The failure `code` of one request, with its message for users."""
    return Failed([rid], code, _SENTENCES.get(code, _INTERNAL))


def joined(first: RowDelta, second: RowDelta) -> RowDelta:
    """Two successive deltas of one request as one."""
    return RowDelta(
        first.rid,
        first.text + second.text,
        first.tokens + second.tokens,
        first.logprobs + second.logprobs,
        second.finish,
    )


def _delta(stream: TextStream, token: RowToken) -> RowDelta:
    # A row stops by itself at an end token only, which is no text even where it has a spelling.
    text = "" if token.finish == "stop" else stream.push(token.token_id)
    finish: FinishReason | None = token.finish
    if finish is not None:
        text += stream.finish()
    if stream.stopped:
        finish = "stop"
    logprobs = [] if token.logprob is None else [token]
    return RowDelta(token.row, text, [token.token_id], logprobs, finish)


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
    dropped. The actor owns its mailboxes. `images` expands visuals, for a vision model.
    """

    def __init__(
        self,
        *,
        inbox: Receiver[TokenizerMessage],
        to_scheduler: Sender[SchedulerMessage],
        to_scheduler_control: Sender[SchedulerControl],
        to_door: Sender[DoorMessage],
        tokenizer: Tokenizer,
        images: PromptImages | None = None,
    ) -> None:
        self._inbox = inbox
        self._to_scheduler = to_scheduler
        self._to_scheduler_control = to_scheduler_control
        self._to_door = to_door
        self._tokenizer = tokenizer
        self._images = images
        self._streams = TextStreams(tokenizer)
        self._intake = _Lane(INTAKE_LIMIT)
        self._bulk = _Lane(BULK_LIMIT)
        self._unsent_failures: deque[Failed] = deque()
        # The current executor, None while there is none, and its last output.
        self._executor: int | None = None
        self._heard = 0
        self.lost = 0

    def limit_images(self, most_tokens: int) -> None:
        """Limit the tokens of an image from now on."""
        if self._images is not None:
            self._images.most_tokens = most_tokens

    async def run(self) -> None:
        """Work until cancelled; raises MailboxFull when the scheduler is far behind."""
        with self._inbox, self._to_scheduler, self._to_scheduler_control, self._to_door:
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
            case ExecutorReady(incarnation):
                self._executor, self._heard = incarnation, 0
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
        lane = self._bulk if _size(message) >= _BULK else self._intake
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
        ids, images = await self._read(message)
        # From here on a cancel goes behind it.
        if not lane.remove(message.rid):
            return
        if not ids:
            field = "messages" if message.prompt is None else "prompt"
            raise HearthError("prompt_empty", "the prompt has no tokens: write something", field)
        # Opened before the scheduler knows of it, so that no token can come too early.
        self._streams.open(message)
        encoded = time.monotonic()
        request = structs.replace(
            message,
            turns=None,
            prompt=None,
            visuals=[],
            token_ids=ids,
            encoded=encoded,
            images=images,
        )
        await self._to_scheduler.send(request, SEND_TIMEOUT_S)

    async def _convert(self, request: Convert) -> None:
        ids = request.tokens
        if ids is None:
            found, _ = await self._read(request)
            await self._answer(Converted(request.rid, tokens=found))
            return
        text = await _run(
            lambda: self._tokenizer.decode(ids, skip_special=False), long=len(ids) >= _LONG_IDS
        )
        await self._answer(Converted(request.rid, text=text))

    async def _read(self, message: Request | Convert) -> tuple[list[int], list[PromptImage]]:
        """The token ids of a request, and its images if it is to be submitted."""
        text = message.prompt if isinstance(message, Request) else message.text
        if text is not None:
            field = "prompt" if isinstance(message, Request) else "text"
            encode = partial(self._tokenizer.encode, text, field)
            return await _run(encode, long=len(text) >= _LONG_TEXT), []
        turns, visuals = message.turns or [], message.visuals
        long = _letters(turns) >= _LONG_TEXT
        if not visuals and not any(turn.parts for turn in turns):
            pairs = [(turn.role, turn.content) for turn in turns]
            return await _run(lambda: self._tokenizer.encode_chat(pairs), long=long), []
        if (images := self._images) is None:
            raise HearthError(TEXT_ONLY.code, TEXT_ONLY.message, TEXT_ONLY.field)
        prompt = await _run(lambda: images.encode(turns, visuals), long=long)
        if isinstance(message, Convert):
            return prompt.ids, []
        digested = _size(message) - _letters(turns)
        works = partial(images.works, prompt, visuals)
        return prompt.ids, await _run(works, long=digested >= _LONG_TEXT)

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
        for rid in message.rids:
            self._streams.drop(rid)
        await self._answer(message)

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
) -> TokenizerActor:
    """Open the tokenizer of an engine folder and its mailboxes, in the daemon's process.

    Other processes reach it at `socket`; `see` makes `PromptImages` for a vision model. Raises
    HearthError for a folder that cannot be read.
    """
    tokenizer = Tokenizer.open(engine)
    return TokenizerActor(
        inbox=Receiver(context, [TOKENIZER, socket], TokenizerMessage, WORK_LIMIT),
        to_scheduler=Sender(context, SCHEDULER, WORK_LIMIT),
        to_scheduler_control=Sender(context, SCHEDULER_CONTROL, CONTROL_LIMIT),
        to_door=Sender(context, DOOR, WORK_LIMIT),
        tokenizer=tokenizer,
        images=see and see(tokenizer),
    )


def _size(message: Request | Convert) -> int:
    """Cost of a message, in characters or ids to process."""
    if isinstance(message, Convert) and message.tokens is not None:
        return len(message.tokens)
    text = message.prompt if isinstance(message, Request) else message.text
    if text is not None:
        return len(text)
    size = _letters(message.turns or ())
    if isinstance(message, Request):
        # A digest of their bytes is made.
        frames = (frame for visual in message.visuals for frame in visual.frames)
        size += sum(frame.slot.size for frame in frames) // _HASHED
    return size


def _letters(turns: Sequence[ChatTurn]) -> int:
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
