"""Token ids of a reply on their way to text, reasoning and calls."""

from collections.abc import Sequence

import msgspec

from hearth.runtime.text.conversation import Tool
from hearth.runtime.text.reply_format import ReplyFormat
from hearth.runtime.text.stream import TextStream
from hearth.runtime.text.tokenizer import Tokenizer


class CallPiece(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A piece of the call `index` of a reply.

    The first piece has `id` and `name`, all of them the next characters of the arguments' JSON
    text, and `complete` is True in the last piece of a call that came to its end.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    complete: bool = False


class ReplyPieces(msgspec.Struct, array_like=True, omit_defaults=True):
    """Pieces of a reply that can be released now, perhaps none."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = []


class ReplyReader:
    """One reply, token by token, as text, reasoning and calls, up to a stop string in its text.

    Without `reply_format` all of it is text, as `TextStream` gives it. Calls are read where there
    are `tools`, which also type their arguments. `in_reasoning` is that of the prompt
    (`EncodedChat`). What is no call is text, in full. Raises `invalid_value` for an empty stop
    string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reply_format: ReplyFormat | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] = (),
        *,
        in_reasoning: bool = False,
    ) -> None:
        del reply_format, tools, in_reasoning
        self._stream = TextStream(tokenizer, stop)

    @property
    def stopped(self) -> bool:
        """True if a stop string matched; no text of or after it was released."""
        return self._stream.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that matched."""
        return None

    def push(self, token_id: int) -> ReplyPieces:
        """Add a token; returns what can be released now."""
        return ReplyPieces(text=self._stream.push(token_id))

    def finish(self) -> ReplyPieces:
        """Release what was held back; an unfinished call whose name was not released is text."""
        return ReplyPieces(text=self._stream.finish())
