"""The life of a request: its body, its generation, its answer, and whoever leaves before that."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from hearth_client import AsyncClient, AsyncGeneration, Delta, Done, TokenLogprob
from hearth_client.errors import HearthClientError, ProtocolViolation
from hearth_client.options import Turns
from hearth_http.errors import TOO_LARGE, UNAVAILABLE, ApiError, of_client
from hearth_http.fields import Fields

_DEADLINE_S = 600.0
"""Seconds of a generation that names none: the patience of the `openai` package."""
_BODY_S = 30.0
"""Seconds in which a body has to come."""
_TOO_SLOW = 408
_ARGUMENTS = msgspec.json.Decoder(dict[str, Any])
ResultT = TypeVar("ResultT")


class ClientLeftError(Exception):
    """The program has closed its connection, so nobody is there to be answered."""


class Bodies:
    """Intake of bodies: of `most` bytes each, and of `together` at a time."""

    def __init__(self, most: int, together: int) -> None:
        self._most, self._together = most, together
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """The whole body; raises ApiError for one that is too large or too slow."""
        try:
            return await asyncio.wait_for(self._read(request.receive), _BODY_S)
        except asyncio.TimeoutError:
            text = f"the body did not come within {_BODY_S:.0f} s"
            raise ApiError(_TOO_SLOW, "deadline_exceeded", text) from None

    async def _read(self, receive: Receive) -> bytes:
        body, size = bytearray(), 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeftError
                size += len(message.get("body", b""))
                if size <= self._most:
                    self._take(body, message.get("body", b""))
                if not message.get("more_body", False):
                    break
        finally:
            self._held -= len(body)
        # Read to its end, as a program that still writes would not see the answer.
        if size > self._most:
            text = f"the body has {size} bytes, the limit is {self._most}"
            raise ApiError(TOO_LARGE, "message_too_large", text)
        return bytes(body)

    def _take(self, body: bytearray, data: bytes) -> None:
        if self._held + len(data) > self._together:
            text = "the bodies of other requests take all room that there is for them"
            raise ApiError(UNAVAILABLE, "queue_full", text, retry_after_s=1.0)
        self._held += len(data)
        body += data


async def _until_left(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`, which is cancelled with ClientLeftError when the program leaves."""
    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_leaving(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientLeftError
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass
class Asked:
    """A generation in Hearth's words: `prompt` or `turns`, and options of `generate`.

    `names` are patterns of Hearth's fields and what the API calls them; the first one counts.
    """

    options: dict[str, Any]
    prompt: str | None = None
    turns: Turns | None = None
    names: Sequence[tuple[str, str]] = ()

    def renamed(self, path: str) -> str:
        """The API's name of a field of Hearth's."""
        for pattern, name in self.names:
            if re.match(pattern, path):
                return re.sub(pattern, name, path, count=1)
        return path


class Running:
    """A generation whose first delta has come, or its end."""

    def __init__(self, generation: AsyncGeneration, first: Delta | None, asked: Asked) -> None:
        self._generation, self._first, self._asked = generation, first, asked
        self.id = generation.request
        self.created = int(time.time())

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """All deltas; raises ApiError. Whoever leaves early ends the generation."""
        try:
            if self._first is not None:
                yield self._first
            async for delta in self._generation:
                yield delta
        except HearthClientError as error:
            raise of_client(error, self._asked.renamed) from error
        finally:
            self._generation.cancel()

    def cancel(self) -> None:
        """End the generation, unless it has ended."""
        self._generation.cancel()

    @property
    def done(self) -> Done:
        """Reasons and usage, once the deltas have ended; raises ApiError."""
        if self._generation.done is None:
            lost = ProtocolViolation("the generation has ended without a word of how")
            raise of_client(lost, self._asked.renamed)
        return self._generation.done

    def reason(self, choice: int) -> str:
        """Reason for which a reply has ended."""
        done = self.done
        return done.choices[choice].reason if choice < len(done.choices) else done.reason


@dataclass
class Call:
    """A request that may ask the daemon: its fields, its session, and whether it is still there."""

    fields: Fields
    client: AsyncClient
    salt: str
    receive: Receive

    async def unless_left(
        self, work: Coroutine[Any, Any, ResultT], asked: Asked | None = None
    ) -> ResultT:
        """The result of `work`; raises ApiError, and ClientLeftError where the program leaves."""
        try:
            return await _until_left(self.receive, work)
        except HearthClientError as error:
            raise of_client(error, (asked or Asked({})).renamed) from error

    async def served(self) -> str:
        """Name of the model that the daemon serves."""
        return (await self.unless_left(self.client.connect())).model

    async def begin(self, asked: Asked) -> Running:
        """Start a generation and wait for its first delta."""
        options = {"deadline_s": _DEADLINE_S, "cache_salt": self.salt, **asked.options}
        return await self.unless_left(self._begin(asked, options), asked)

    async def _begin(self, asked: Asked, options: dict[str, Any]) -> Running:
        generation = await self.client.generate(asked.prompt, messages=asked.turns, **options)
        try:
            return Running(generation, await anext(generation, None), asked)
        except BaseException:
            generation.cancel()
            raise


@dataclass
class Written:
    """One reply as far as it has come, in pieces."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: dict[int, tuple[str, str, list[str]]] = field(default_factory=dict)
    """Id, name and pieces of the arguments of each call."""

    def add(self, delta: Delta) -> None:
        """Take in a delta of this reply."""
        self.text.append(delta.text)
        self.reasoning.append(delta.reasoning)
        self.logprobs += delta.logprobs
        for piece in delta.tool_calls:
            self.calls.setdefault(piece.index, (piece.id, piece.name, []))
            self.calls[piece.index][2].append(piece.arguments)

    def whole_calls(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Id, name and arguments of the calls that are whole: a reply may have been cut in one."""
        found = []
        for call_id, name, pieces in self.calls.values():
            with suppress(msgspec.DecodeError):
                found.append((call_id, name, _ARGUMENTS.decode("".join(pieces))))
        return found


async def written(running: Running, replies: int) -> list[Written]:
    """Wait for all replies, and gather them."""
    found = [Written() for _ in range(replies)]
    async with aclosing(running.deltas()) as deltas:
        async for delta in deltas:
            if delta.choice < replies:
                found[delta.choice].add(delta)
    return found


class Stream(StreamingResponse):
    """An answer in pieces, which ends where the program leaves, and the generation with it.

    A failure of `events` becomes the last piece, which `failed` writes.
    """

    def __init__(
        self,
        running: Running,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[ApiError], bytes],
        media_type: str,
    ) -> None:
        # A proxy that gathers pieces would keep them from whoever waits.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type=media_type)
        self._running, self._events, self._failed = running, events, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces, and read nothing more of the generation once nobody is there."""
        del scope
        try:
            with suppress(ClientLeftError):
                await _until_left(receive, self._send(send))
        finally:
            self._running.cancel()

    async def _send(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except ApiError as error:
                last = {"body": self._failed(error), "more_body": True}
                await send({"type": "http.response.body", **last})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
