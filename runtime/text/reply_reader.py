"""Token ids of a reply on their way to text, reasoning and calls."""

from collections.abc import Sequence

from hearth.runtime.text.conversation import Tool
from hearth.runtime.text.reply_format import ReplyFormat, marks_of
from hearth.runtime.text.reply_parser import ReplyParser, ReplyPieces
from hearth.runtime.text.stream import IncrementalDecoder, StopMatcher, TextStream
from hearth.runtime.text.tokenizer import Tokenizer

_FIRST_STAND_IN = 0xD800


class ReplyReader:
    """One reply, token by token, as text, reasoning and calls, up to a stop string in its text.

    Without `reply_format` all of it is text, as `TextStream` gives it. Calls are read where there
    are `tools`, which also type their arguments; a name that no tool has makes no call.
    `in_reasoning` is that of `EncodedPrompt`. What is no call is text: in full, or from the
    character on where the arguments are none. White space next to marks goes with them. Raises
    `invalid_value` for an empty stop string.
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
        self._plain = TextStream(tokenizer, stop) if reply_format is None else None
        self._tokenizer = tokenizer
        self._stop = StopMatcher(stop)
        self._decoder = IncrementalDecoder(tokenizer.decode)
        shape = reply_format or ReplyFormat("", "own")
        spellings = tokenizer.special_in("\n".join(marks_of(shape)))
        self._marks = {
            number: chr(_FIRST_STAND_IN + index) for index, number in enumerate(spellings)
        }
        shown = {self._marks[number]: text for number, text in spellings.items()}
        self._parser = ReplyParser(shape, shown, tools, in_reasoning=in_reasoning)

    @property
    def stopped(self) -> bool:
        """True if a stop string matched; no text of or after it was released."""
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that matched, the shortest where several begin there."""
        return self._stop.matched if self._plain is None else self._plain.stop_string

    @property
    def in_reasoning(self) -> bool:
        """True where the next token is reasoning, or the mark that ends it."""
        return self._parser.reasons

    def push(self, token_id: int) -> ReplyPieces:
        """Add a token; returns what can be released now."""
        if self._plain is not None:
            return ReplyPieces(self._plain.push(token_id))
        if self.stopped:
            return ReplyPieces()
        if token_id in self._marks:
            text = self._decoder.flush() + self._marks[token_id]
        elif self._tokenizer.has_text(token_id):
            text = self._decoder.push(token_id)
        else:
            return ReplyPieces()
        return self._released(self._parser.feed(text) if text else ReplyPieces())

    def finish(self) -> ReplyPieces:
        """Release what was held back; an unfinished call whose name was not released is text."""
        if self._plain is not None:
            return ReplyPieces(self._plain.finish())
        if self.stopped:
            return ReplyPieces()
        found = self._released(self._parser.feed(self._decoder.finish(), ended=True))
        found.text += self._stop.finish()
        return found

    def _released(self, found: ReplyPieces) -> ReplyPieces:
        found.text = self._stop.push(found.text)
        return found
