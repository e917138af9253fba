"""The client for asyncio and trio."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from hearth_client.async_session import AsyncSession, Timer
from hearth_client.connection import FEATURES, Connection, ReplyT, reply_of
from hearth_client.generation import Collected
from hearth_client.keys import resolve_with_keys
from hearth_client.options import (
    ChatOptions,
    GenerateOptions,
    Turns,
    as_messages,
    generate_request,
    tokenize_request,
)
from hearth_client.pictures import Frame
from hearth_client.protocol import (
    Delta,
    Detokenize,
    Detokenized,
    Done,
    Message,
    Request,
    Status,
    StatusReport,
    Tokens,
    Welcome,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_RETURN_S = 1.0
"""Seconds that a cancelled reader may stay away before its generation is cancelled too."""


class AsyncGeneration(Collected[AsyncSession]):
    """A stream of deltas for one task; leaving an `async with` cancels the generation.

    So does forgetting it before its end. Who was cancelled while waiting for a delta, as a timeout
    does it, loses nothing and may go on within a second; then the generation is cancelled.
    """

    _left: Timer | None = None

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._left is not None:
            self._left.cancel()
        while True:
            delta = self._take()
            if delta is not None:
                return delta
            if self._exchange.ended:
                raise StopAsyncIteration
            try:
                await self._session.wait_for(self._exchange)
            except BaseException:  # Each library has a cancellation of its own.
                self._left = self._session.forget_later(self._exchange, _RETURN_S)
                raise

    async def text(self) -> str:
        """Wait for the end; returns the whole text, with what was iterated before."""
        async for _ in self:
            pass
        return self._replies[0].text

    async def message(self) -> Message:
        """Wait for the end; returns the turn, to go on with in a conversation."""
        await self.text()
        return self._replies[0].message()

    async def result(self) -> Done:
        """Wait for the end; returns the reason and the usage, as `done` has them then."""
        await self.text()
        return self._result()

    async def aclose(self) -> None:
        """Read no more: the generation is cancelled, unless it has ended."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncClient:
    """A session with the daemon for the tasks of one asyncio loop (uvloop included) or trio run.

    The arguments are those of `Client`. The loop itself reads and renews the lease, so a task may
    pause as long as it likes, and a cancelled wait loses nothing; a loop that blocks for longer
    than the lease loses its requests. Not for several threads, and not across a fork.
    """

    def __init__(
        self,
        address: str | os.PathLike[str] | None = None,
        *,
        timeout: float | None = None,
        silence_s: float = 60.0,
        lease_s: float | None = None,
        name: str = "hearth-client-python",
        status_only: bool = False,
        features: Sequence[str] = FEATURES,
        client_key: str | os.PathLike[str] | None = None,
        server_key: str | None = None,
    ) -> None:
        self.address: str
        self.address, keys = resolve_with_keys(address, client_key, server_key)
        connection = Connection(
            name, lease_s, silence_s, status_only=status_only, features=features
        )
        self._session = AsyncSession(self.address, keys, connection, timeout, silence_s)

    async def connect(self) -> Welcome:
        """Open the session unless it is open; raises ConnectionFailed when no daemon answers."""
        return await self._session.open()

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Turns | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Start a generation from a raw `prompt` or from `messages`, exactly one of them.

        The options are those of `GenerateOptions`, max_tokens=64 for instance; values are checked
        by the daemon.
        """
        turns, frames = as_messages(messages)
        exchange = await self._session.request(
            lambda i: generate_request(i, prompt, turns, options), frames
        )
        return AsyncGeneration(self._session, exchange)

    def cancel(self, generation: AsyncGeneration) -> None:
        """End a generation; does nothing when it has ended."""
        generation.cancel()

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Turns | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Token ids of `text`, or of `messages` with the chat template applied."""
        turns, frames = as_messages(messages)
        reply = await self._ask(lambda i: tokenize_request(i, text, turns, options), Tokens, frames)
        return reply.tokens

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of token ids."""
        reply = await self._ask(lambda i: Detokenize(id=i, tokens=list(tokens)), Detokenized)
        return reply.text

    async def status(self) -> StatusReport:
        """Report of what the daemon serves and does now."""
        return await self._ask(lambda i: Status(id=i), StatusReport)

    async def close(self) -> None:
        """End the session; open generations end with ClientClosed."""
        self._session.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(
        self, build: Callable[[str], Request], kind: type[ReplyT], frames: Sequence[Frame] = ()
    ) -> ReplyT:
        exchange = await self._session.request(build, frames)
        await self._session.wait_for(exchange)
        return reply_of(exchange, kind)
