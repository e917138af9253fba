from collections.abc import Sequence

from runtime.text.incremental_decoder import IncrementalDecoder
from runtime.text.stop import StopMatcher
from runtime.text.tokenizer import Tokenizer


class TextStream:
    """The text of one generation, token by token, up to a stop string.

    Released text is always complete characters; special tokens do not show. Raises
    `invalid_value` for an empty stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer.decode)
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string matched; nothing of or after it was released."""
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that can be released now."""
        if self.stopped or not self._tokenizer.has_text(token_id):
            return ""
        return self._matcher.push(self._decoder.push(token_id))

    def finish(self) -> str:
        """Release what was held back; U+FFFD stands for a character that was cut."""
        return self._matcher.push(self._decoder.finish()) + self._matcher.finish()
