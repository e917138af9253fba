"""Tokens of replies on their way to deltas: text, and what else their clients read."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import structlog
from msgspec import structs

from hearth.actors.messages import Failed, ReplyEnd, Request, RowDelta
from hearth.runtime.grammar import FIELD
from hearth.runtime.request import RowToken
from hearth.runtime.text.conversation import takes_one_call
from hearth.runtime.text.reply_parser import ReplyPieces
from hearth.runtime.text.reply_reader import ReplyReader
from hearth.runtime.text.stream import TokenBytes
from hearth.runtime.text.tokenizer import Tokenizer

_INTERNAL = "this request met a fault of the daemon, written to its log: send it again"
_GRAMMAR = "grammar_invalid"
_SENTENCES = {
    "non_finite": "the model computed values that are not finite for this request: change it, "
    "and export the model again if others fail too",
    _GRAMMAR: "the form that was asked for allows no further token, though the reply has "
    "not ended, or takes too long to follow: change it",
}
_log = structlog.get_logger("tokenizer")


class TextStreams:
    """The text of every open request: tokens in, messages out, no sockets.

    `ends` are the model's end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._open: dict[int, _Reply] = {}

    def __len__(self) -> int:
        return len(self._open)

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    def open(self, request: Request, *, in_reasoning: bool = False, form: str = "") -> None:
        """Begin the text of a request; raises `invalid_value` for an empty stop string.

        `in_reasoning` is that of its prompt, `form` the field that asks for its grammar.
        """
        reader = _reader(self._tokenizer, request, in_reasoning=in_reasoning)
        one_call = request.chat is not None and takes_one_call(request.chat)
        spelt = self._bytes if "token_bytes" in request.features else None
        self._open[request.rid] = _Reply(reader, self._ends, spelt, form, one_call=one_call)

    def by_field(self, failed: Failed) -> list[Failed]:
        """The failure by the fields of its requests, where it is one of their grammars."""
        if failed.field != FIELD:
            return [failed]
        forms = {rid: reply.form for rid in failed.rids if (reply := self._open.get(rid))}
        return [
            structs.replace(failed, rids=[rid], field=forms.get(rid, FIELD)) for rid in failed.rids
        ]

    def drop(self, rid: int) -> None:
        """Forget a request; unknown ones are ignored."""
        self._open.pop(rid, None)

    def take(self, token: RowToken) -> RowDelta | Failed | None:
        """Turn one token into a delta or a failure; None for a request that is not open.

        A request that ends with the token, in text or failure, is forgotten.
        """
        rid = token.row
        reply = self._open.get(rid)
        if reply is None:
            return None
        try:
            answer = reply.failed(token) if token.error else reply.push(token)
        except Exception:  # noqa: BLE001 - no row may take the others with it
            _log.exception("a token could not be turned into text", rid=rid)
            answer = failed_with(rid, "internal")
        if isinstance(answer, Failed) or answer.finish is not None:
            self.drop(rid)
        return answer

    def cut(self, rid: int) -> RowDelta | None:
        """The last delta of a request that gets no more tokens; None if it is not open."""
        reply = self._open.pop(rid, None)
        return None if reply is None else reply.cut(rid)


class _Reply:
    """One reply; it ends behind its first call where it may have but `one_call`."""

    def __init__(
        self,
        reader: ReplyReader,
        ends: Collection[int],
        spelt: TokenBytes | None,
        form: str,
        *,
        one_call: bool,
    ) -> None:
        self.form = form
        self._reader = reader
        self._spelt = spelt
        self._ends = ends
        self._one_call = one_call
        self._called = False

    def failed(self, token: RowToken) -> Failed:
        """The failure that a token tells of."""
        failed = failed_with(token.row, token.error or "internal")
        return structs.replace(failed, field=self.form) if failed.code == _GRAMMAR else failed

    def push(self, token: RowToken) -> RowDelta:
        """The delta of one token; with a `finish` where the reply ends with it."""
        # An end token is no text even where it has a spelling; the last one of a grammar is text.
        ended = token.finish == "stop" and token.token_id in self._ends
        delta = RowDelta(token.row, "", [token.token_id], [] if token.logprob is None else [token])
        if delta.logprobs and self._spelt is not None:
            ids = [token.token_id, *(other.token_id for other in token.top)]
            delta.spellings = [[self._spelt.of(one) for one in ids]]
        finish: ReplyEnd | None = token.finish
        if not ended:
            began = self._reader.in_reasoning
            self._add(delta, self._reader.push(token.token_id))
            delta.reasoning_tokens = int(began or self._reader.in_reasoning)
        if self._one_call and self._called:
            finish = "stop"
        if finish is not None:
            self._add(delta, self._reader.finish())
        if self._reader.stopped:
            finish, delta.stop_string = "stop", self._reader.stop_string or ""
        if finish == "stop" and self._called:
            finish = "tool_calls"
        delta.finish = finish
        return delta

    def cut(self, rid: int) -> RowDelta:
        """The delta behind the last token, of what was held back."""
        delta = RowDelta(rid, "", [], finish="length")
        self._add(delta, self._reader.finish())
        return delta

    def _add(self, delta: RowDelta, pieces: ReplyPieces) -> None:
        delta.text += pieces.text
        delta.reasoning += pieces.reasoning
        delta.calls = [*delta.calls, *pieces.calls]
        self._called = self._called or any(piece.complete for piece in pieces.calls)


def _reader(tokenizer: Tokenizer, request: Request, *, in_reasoning: bool) -> ReplyReader:
    """The reader of what a client reads: text alone of a prompt, or without features."""
    chat, stop = request.chat, request.options.stop
    if chat is None or not {"reasoning", "tool_calls"}.intersection(request.features):
        return ReplyReader(tokenizer, None, stop)
    form = tokenizer.reply_format
    if "reasoning" not in request.features:
        form, in_reasoning = structs.replace(form, reasoning=("", "")), False
    calls = "tool_calls" in request.features and chat.tool_choice != "none"
    tools = chat.tools if calls else ()
    return ReplyReader(tokenizer, form, stop, tools, in_reasoning=in_reasoning)


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
        first.reasoning + second.reasoning,
        first.calls + second.calls,
        second.stop_string,
        first.spellings + second.spellings,
        first.reasoning_tokens + second.reasoning_tokens,
    )
