from __future__ import annotations

import structlog

from hearth.actors.messages import Failed, Request, RowDelta
from hearth.runtime.request import FinishReason, RowToken
from hearth.runtime.text import TextStream, Tokenizer

_INTERNAL = "this request met a fault of the daemon, written to its log: send it again"
_SENTENCES = {
    "non_finite": "the model computed values that are not finite for this request: change it, "
    "and export the model again if others fail too",
}
_log = structlog.get_logger("tokenizer")


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

    def take(self, rid: int, token: RowToken) -> RowDelta | Failed | None:
        """The meaning of one token; None for a request that is not open (any more).

        A request that ends with the token, in text or failure, is forgotten.
        """
        stream = self._open.get(rid)
        if stream is None:
            return None
        try:
            answer = failed_with(rid, token.error) if token.error else _delta(rid, stream, token)
        except Exception:  # noqa: BLE001 - no row may take the others with it
            _log.exception("a token could not be turned into text", rid=rid)
            answer = failed_with(rid, "internal")
        if isinstance(answer, Failed) or answer.finish is not None:
            self.drop(rid)
        return answer

    def cut(self, rid: int) -> RowDelta | None:
        """The end of a request that gets no more tokens; None where it is not open."""
        stream = self._open.pop(rid, None)
        return None if stream is None else RowDelta(rid, stream.finish(), [], finish="length")


def failed_with(rid: int, code: str) -> Failed:
    """The failure `code` of one request, told in Hearth's words."""
    return Failed(rid, code, _SENTENCES.get(code, _INTERNAL))


def joined(first: RowDelta, second: RowDelta) -> RowDelta:
    """Two successive deltas of one request as one."""
    return RowDelta(
        first.rid,
        first.text + second.text,
        first.tokens + second.tokens,
        first.logprobs + second.logprobs,
        second.finish,
    )


def _delta(rid: int, stream: TextStream, token: RowToken) -> RowDelta:
    # A row stops by itself at an end token only, which is no text even where it has a spelling.
    text = "" if token.finish == "stop" else stream.push(token.token_id)
    finish: FinishReason | None = token.finish
    if finish is not None:
        text += stream.finish()
    if stream.stopped:
        finish = "stop"
    logprobs = [] if token.logprob is None else [token]
    return RowDelta(rid, text, [token.token_id], logprobs, finish)
