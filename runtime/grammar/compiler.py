import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.errors import HearthError
from hearth.runtime.grammar.checks import check_start, parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_WORD_BITS = 32
FIELD = "grammar"
"""The field of errors here: the option that holds what a request asks for in several fields."""
_DEAD_END = "no token of the model goes on by this grammar"
_SLOW = "this grammar takes too long to follow"
_MASK_S, _SPARE_S = 0.01, 0.5


class _Allowance:
    """CPU time that the masks of a row, and the tokens between them, may take in the mean.

    `_MASK_S` a mask, where what is left of it adds up to `_SPARE_S`: all rows wait meanwhile.
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _SPARE_S

    def take(self, began: float, given: float = 0.0) -> None:
        """Count CPU time of the thread since `began`; raises `grammar_invalid` past the end."""
        self._left = min(_SPARE_S, self._left + given - (time.thread_time() - began))
        if self._left < 0:
            raise HearthError("grammar_invalid", _SLOW, FIELD)


class GrammarMatcher:
    """State of a grammar behind the tokens of one row; it makes the mask of the next one.

    Methods raise `grammar_invalid`, and the matcher is of no more use then.
    """

    __slots__ = ("_allowance", "_buffer", "_end_tokens", "_matcher", "_vocab_size", "ended")

    def __init__(
        self, matcher: "LLMatcher", words: int, vocab_size: int, end_tokens: frozenset[int]
    ) -> None:
        self._allowance = _Allowance()
        self._matcher, self._vocab_size, self._end_tokens = matcher, vocab_size, end_tokens
        self._buffer = np.zeros(words, np.uint32)
        self.ended = False
        """True once an end token was accepted: nothing follows."""

    def mask(self) -> NDArray[np.uint32]:
        """Return the mask of the next token, [V / 32, rounded up]; the next call overwrites it.

        Bit t % 32 of word t // 32 allows token t; some are allowed, and none without a logit.
        """
        buffer, began = self._buffer, time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
        self._allowance.take(began, _MASK_S)
        words = -(-self._vocab_size // _WORD_BITS)
        mask = buffer[:words]
        if rest := self._vocab_size % _WORD_BITS:
            mask[-1] &= np.uint32((1 << rest) - 1)
        # A mask of a matcher that failed is not empty: it allows the end token.
        if self._matcher.is_error() or not mask.any():
            raise HearthError("grammar_invalid", _DEAD_END, FIELD)
        return mask

    def tree_masks(self, ids: Sequence[int], parents: Sequence[int]) -> list[NDArray[np.uint32]]:
        """Return the masks behind the nodes of a token tree; node 0 is the token accepted last.

        A node comes after its parent, which is below 0 where there is no node. Nothing is allowed
        behind a node that the grammar does not reach, or ends with.
        """
        masks = [self.mask()]
        behind: list[GrammarMatcher | None] = [self]
        nothing = np.zeros_like(masks[0])
        for token, parent in zip(ids[1:], parents[1:], strict=True):
            matcher = behind[parent] if parent >= 0 else None
            if matcher is not None:
                allowed = masks[parent][token // _WORD_BITS] >> np.uint32(token % _WORD_BITS) & 1
                matcher = matcher.fork() if allowed else None
            mask = nothing
            if matcher is not None and token not in self._end_tokens:
                try:
                    matcher.accept(token)
                    mask = matcher.mask()
                except HearthError:
                    # The row fails by it, if its tokens come here.
                    matcher = None
            masks.append(mask)
            behind.append(matcher)
        return masks

    def accept(self, token_id: int) -> None:
        """Follow a token, which the mask before it has allowed."""
        began = time.thread_time()
        # A matcher that nothing can extend has stopped by itself, and takes no end token.
        if token_id in self._end_tokens:
            self.ended = self._matcher.is_accepting() and not self.ended
            followed = self.ended
        else:
            followed = not self.ended and self._matcher.consume_token(token_id)
        if not followed:
            raise HearthError("grammar_invalid", "this token is not of the grammar", FIELD)
        self._allowance.take(began)

    def replay(self, token_ids: Sequence[int]) -> None:
        """Follow tokens that a row has had before, none of which has ended it."""
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            raise HearthError("grammar_invalid", "these tokens are not of the grammar", FIELD)

    def rollback(self, tokens: int) -> None:
        """Forget the last accepted tokens."""
        if tokens and self.ended:
            self.ended, tokens = False, tokens - 1
        if tokens and not self._matcher.rollback(tokens):
            raise HearthError("grammar_invalid", "these tokens cannot be taken back", FIELD)

    def fork(self) -> "GrammarMatcher":
        """Return a matcher of its own in the same state; they share the time that they may take."""
        words, vocab_size = self._buffer.size, self._vocab_size
        other = GrammarMatcher(self._matcher.deep_copy(), words, vocab_size, self._end_tokens)
        other.ended, other._allowance = self.ended, self._allowance
        return other


_MOST_KEPT, _MOST_BYTES, _MOST_PENDING = 64, 8 << 20, 16


class GrammarCompiler:
    """Compiles the grammars of one model in a thread of its own, and keeps them by their text.

    llguidance's tokenizer is made with the first grammar: a second for 150,000 tokens. `descriptor`
    is readable once a compilation has ended, until the next `ready`. Methods are called by one
    thread.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._path, self._vocab_size = tokenizer, vocab_size
        self._end_tokens = frozenset(end_tokens)
        self._tokenizer: LLTokenizer | None = None
        self._pool = ThreadPoolExecutor(1, "grammar")
        self._pending: dict[str, Future[LLMatcher]] = {}
        self._kept: OrderedDict[str, LLMatcher | HearthError] = OrderedDict()
        self._bytes = 0
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ready(self, grammar: str) -> bool:
        """Return True if a grammar is compiled, or none; else it soon will be.

        Raises `grammar_invalid` where that failed, `unsupported_option` where the model's tokenizer
        is none that grammars can be compiled for.
        """
        if not grammar:
            return True
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        for text in [text for text, job in self._pending.items() if job.done()]:
            self._keep(text, self._pending.pop(text))
        if grammar in self._kept:
            self._found(grammar)
            return True
        if grammar not in self._pending and len(self._pending) < _MOST_PENDING:
            job = self._pending[grammar] = self._pool.submit(self._compile, grammar)
            job.add_done_callback(self._tell)
        return False

    def keep_only(self, wanted: Iterable[str]) -> None:
        """Drop the grammars that wait for the compiler, but for those that are `wanted` still."""
        if self._pending:
            unwanted = self._pending.keys() - set(wanted)
            for text in [text for text in unwanted if self._pending[text].cancel()]:
                del self._pending[text]

    def matcher(self, grammar: str, token_ids: Sequence[int] = ()) -> GrammarMatcher:
        """Return a matcher behind tokens that it has allowed before; it waits for the compiler.

        Raises as `ready` does, and `grammar_invalid` for other tokens.
        """
        while not self.ready(grammar):
            next(iter(self._pending.values())).exception()
        found = self._found(grammar)
        # The tokenizer may have more tokens than the model has logits.
        words = -(-self._known_tokenizer().vocab_size // _WORD_BITS)
        matcher = GrammarMatcher(found.deep_copy(), words, self._vocab_size, self._end_tokens)
        matcher.replay(token_ids)
        return matcher

    def close(self) -> None:
        """End the thread when what it compiles is compiled."""
        self._pool.shutdown(cancel_futures=True)
        os.close(self.descriptor)

    def _found(self, grammar: str) -> "LLMatcher":
        self._kept.move_to_end(grammar)
        found = self._kept[grammar]
        if isinstance(found, HearthError):
            raise HearthError(found.code, found.message, found.field)
        return found

    def _keep(self, grammar: str, job: "Future[LLMatcher]") -> None:
        error = job.exception()
        if error is None:
            self._kept[grammar] = job.result()
        elif isinstance(error, HearthError):
            self._kept[grammar] = error
        else:
            # Whatever a grammar does to its compiler, its request fails alone.
            what = "the grammar could not be compiled"
            self._kept[grammar] = HearthError("internal", what, FIELD)
        self._bytes += len(grammar)
        while len(self._kept) > _MOST_KEPT or self._bytes > _MOST_BYTES > len(grammar):
            oldest, _ = self._kept.popitem(last=False)
            self._bytes -= len(oldest)

    def _tell(self, _job: "Future[LLMatcher]") -> None:
        # Jobs that are cancelled at the end find it closed.
        with suppress(OSError):
            os.eventfd_write(self.descriptor, 1)

    def _compile(self, grammar: str) -> "LLMatcher":
        """Compile a grammar and make its first mask; on the compiler's thread."""
        from llguidance import LLMatcher  # noqa: PLC0415 - an extra

        tokenizer = self._known_tokenizer()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        check_start(matcher, FIELD)
        return matcher

    def _known_tokenizer(self) -> "LLTokenizer":
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        return self._tokenizer

    def _read_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer  # noqa: PLC0415 - an extra

        path, ends = str(self._path), sorted(self._end_tokens)
        try:
            found = LLTokenizer(path, eos_token=ends)
            if found.vocab_size < self._vocab_size:
                found = LLTokenizer(path, n_vocab=self._vocab_size, eos_token=ends)
        except ValueError as error:
            what = "grammars cannot be compiled for this model's tokenizer"
            raise HearthError("unsupported_option", what, FIELD) from error
        return found
