"""The blocking client."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from hearth_client.blocking_session import BlockingSession
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


class Generation(Collected[BlockingSession]):
    """A stream of deltas; iterate it, or collect it with `text`.

    Leaving a `with` cancels it, and so does forgetting it before its end, as `break` in a `for`
    over a call does.
    """

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        self._session.renew()
        while True:
            delta = self._take()
            if delta is not None:
                return delta
            if self._exchange.ended:
                raise StopIteration
            self._session.wait_for(self._exchange)

    def text(self) -> str:
        """Wait for the end; returns the whole text, with what was iterated before."""
        for _ in self:
            pass
        return self._replies[0].text

    def message(self) -> Message:
        """Wait for the end; returns the turn, to go on with in a conversation."""
        self.text()
        return self._replies[0].message()

    def result(self) -> Done:
        """Wait for the end; returns the reason and the usage, as `done` has them then."""
        self.text()
        return self._result()

    def close(self) -> None:
        """Read no more: the generation is cancelled, unless it has ended."""
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Client:
    """A session with the daemon; several generations may be open and read in turns.

    `timeout` bounds the wait for the daemon's welcome, `silence_s` the wait for any sign of it
    later, both in seconds. Where no daemon listens ConnectionRefused is raised at once; with a
    `timeout` of the caller's own (else it is 5) a daemon that is about to start is waited for, and
    so always is one that was met and went away.

    The daemon ends the requests of a client that it has not heard of for a lease; a waiting client
    renews it, and one whose caller pauses between two calls for longer must ask for more by
    `lease_s`. A lost session is opened anew by the next request. One that is `status_only` can do
    nothing else, and has a place where no other client finds one. `features` are what it reads of
    answers: without "reasoning" and "tool_calls" these stay in the text; "generation_defaults" are
    the model's own options of sampling.

    An address `tcp://127.0.0.1:PORT` needs `client_key`, the file that `hearth keys add` wrote
    (or a secret key itself, with the daemon's public one as `server_key`); else `$HEARTH_KEY` and
    `$HEARTH_SERVER_KEY` tell them.

    Not for several threads at once and, once it is connected, not across a fork: each thread and
    process makes its own. ClientShared is raised otherwise.
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
        self._session = BlockingSession(self.address, keys, connection, timeout, silence_s)

    def connect(self) -> Welcome:
        """Open the session unless it is open; raises ConnectionFailed when no daemon answers."""
        return self._session.open()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Turns | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Start a generation from a raw `prompt` or from `messages`, exactly one of them.

        The options are those of `GenerateOptions`, max_tokens=64 for instance; values are checked
        by the daemon.
        """
        turns, frames = as_messages(messages)
        exchange = self._session.request(
            lambda i: generate_request(i, prompt, turns, options), frames
        )
        return Generation(self._session, exchange)

    def cancel(self, generation: Generation) -> None:
        """End a generation; does nothing when it has ended."""
        generation.cancel()

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Turns | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Token ids of `text`, or of `messages` with the chat template applied."""
        turns, frames = as_messages(messages)
        reply = self._ask(lambda i: tokenize_request(i, text, turns, options), Tokens, frames)
        return reply.tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of token ids."""
        return self._ask(lambda i: Detokenize(id=i, tokens=list(tokens)), Detokenized).text

    def status(self) -> StatusReport:
        """Report of what the daemon serves and does now."""
        return self._ask(lambda i: Status(id=i), StatusReport)

    def close(self) -> None:
        """End the session; open generations end with ClientClosed."""
        self._session.close()

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self, build: Callable[[str], Request], kind: type[ReplyT], frames: Sequence[Frame] = ()
    ) -> ReplyT:
        exchange = self._session.request(build, frames)
        self._session.wait_for(exchange)
        return reply_of(exchange, kind)
