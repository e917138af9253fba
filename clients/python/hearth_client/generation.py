"""Base of both clients' generations: what has come of their replies so far."""

import weakref
from contextlib import suppress
from copy import copy
from typing import Any, Generic, TypeVar

import msgspec

from hearth_client.connection import Exchange
from hearth_client.errors import ProtocolViolation, ReplyEmpty
from hearth_client.protocol import Accepted, CallPiece, Delta, Done, Message, ToolCall
from hearth_client.session import Session

SessionT = TypeVar("SessionT", bound=Session)
_ARGUMENTS = msgspec.json.Decoder(dict[str, Any])


class Reply:
    """One reply as far as it has come; `tokens` are its ids."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[CallPiece]] = {}

    def add(self, delta: Delta) -> None:
        """Take in a delta of this reply."""
        self.tokens.extend(delta.tokens)
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            self._calls.setdefault(piece.index, []).append(piece)

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The model's reasoning before it."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls that are whole, in their order."""
        found = []
        for pieces in self._calls.values():
            # A reply may have been cut within the last one.
            with suppress(msgspec.DecodeError):
                arguments = _ARGUMENTS.decode("".join(one.arguments for one in pieces))
                found.append(ToolCall(id=pieces[0].id, name=pieces[0].name, arguments=arguments))
        return found

    def message(self) -> Message:
        """The turn that this reply is in a conversation, without a call that was cut.

        Raises ReplyEmpty where that leaves nothing, as no daemon takes an empty turn.
        """
        calls = self.tool_calls
        if not calls and not self.text:
            raise ReplyEmpty(self._why_empty())
        content = None if calls and not self.text else self.text
        return Message(
            role="assistant", content=content, reasoning=self.reasoning, tool_calls=calls
        )

    def _why_empty(self) -> str:
        if self._calls:
            name = [*self._calls.values()][-1][0].name
            return f"the reply was cut within its call of {name}: ask with more max_tokens"
        what = "reasoning alone: ask with more max_tokens" if self.reasoning else "no text, no call"
        return f"the reply is no turn, it has {what}"


class Collected(Generic[SessionT]):
    """Answers of one generation, as taken by its reader; forgotten before its end it is cancelled.

    Tokens, reasoning and calls are those of the first reply, where there are several. A failure has
    the text so far as its `text`.
    """

    def __init__(self, session: SessionT, exchange: Exchange) -> None:
        self._session = session
        self._exchange = exchange
        self._replies = {0: Reply()}
        # At the end of the program the daemon gets notice of the client's own.
        weakref.finalize(self, session.forget, exchange).atexit = False

    @property
    def tokens(self) -> list[int]:
        """The token ids so far."""
        return self._replies[0].tokens

    @property
    def reasoning(self) -> str:
        """The model's reasoning so far."""
        return self._replies[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of tools that are whole by now."""
        return self._replies[0].tool_calls

    @property
    def choices(self) -> list[Reply]:
        """All replies that have begun, in their order; one unless the request had another `n`."""
        return [reply for _, reply in sorted(self._replies.items())]

    @property
    def id(self) -> str:
        """The request's id on its connection."""
        return self._exchange.id

    @property
    def accepted(self) -> Accepted | None:
        """The daemon's notice that the request is queued, with the prompt's length in tokens."""
        return self._exchange.accepted

    @property
    def request(self) -> str:
        """The request's id in the daemon's logs and traces; empty until it is accepted."""
        return self._exchange.accepted.request if self._exchange.accepted else ""

    @property
    def done(self) -> Done | None:
        """Reason and usage; None before the end, and after a failure."""
        return self._exchange.done

    def cancel(self) -> None:
        """Ask the daemon to end this generation; the stream then ends with reason `cancelled`."""
        self._session.cancel(self._exchange)

    def _take(self) -> Delta | None:
        """The next delta that has arrived; raises the request's error after the last one."""
        if self._exchange.deltas:
            delta = self._exchange.deltas.popleft()
            self._replies.setdefault(delta.choice, Reply()).add(delta)
            return delta
        if self._exchange.error is not None:
            # One loss ends several generations, each with a text of its own.
            error = copy(self._exchange.error)
            error.text = self._replies[0].text
            raise error
        return None

    def _result(self) -> Done:
        if self._exchange.done is None:
            raise ProtocolViolation("the generation has ended without a word of how")
        return self._exchange.done
