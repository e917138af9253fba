"""What a client has not read yet: bounded, because a reply's deltas grow into one."""

from collections import deque

from hearth_client.protocol import Answer, Delta, Detokenized, Done, Error, Tokens

# What they take in memory, by which readers that are behind are bounded.
_ANSWER_BYTES = 320
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 140


class Outbox:
    """Answers of one session in order, from the first that could not be sent.

    `blocked_since` is when the session last took an answer, in seconds; meaningful while there
    are any here. `bytes` is about how much the answers here hold, of open requests and of others.
    """

    def __init__(self) -> None:
        self.blocked_since = 0.0
        self.bytes = 0
        self._answers: deque[Answer] = deque()
        self._deltas: dict[str, Delta] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: Answer, now: float) -> None:
        """Append an answer."""
        if not self._answers:
            self.blocked_since = now
        self._answers.append(answer)
        self.bytes += _bytes_of(answer)
        if isinstance(answer, Delta):
            self._deltas[answer.id] = answer
        elif isinstance(answer, (Done, Error)):
            # The id may be used again: text of the next reply does not belong before this.
            self._deltas.pop(answer.id, None)

    def merge(self, more: Delta) -> bool:
        """Grow the delta of the same request that waits here; False when none does."""
        delta = self._deltas.get(more.id)
        if delta is None:
            return False
        delta.text += more.text
        delta.tokens.extend(more.tokens)
        delta.logprobs.extend(more.logprobs)
        delta.ended = more.ended
        self.bytes += _bytes_in(more)
        return True

    def head(self) -> Answer | None:
        """The answer to send next."""
        return self._answers[0] if self._answers else None

    def sent(self, now: float) -> None:
        """The head was taken."""
        answer = self._answers.popleft()
        self.blocked_since = now
        self.bytes -= _bytes_of(answer)
        if isinstance(answer, Delta) and self._deltas.get(answer.id) is answer:
            del self._deltas[answer.id]

    def withdraw(self, request_id: str) -> None:
        """Drop the delta of a request that has failed."""
        delta = self._deltas.pop(request_id, None)
        if delta is not None:
            self._answers = deque(one for one in self._answers if one is not delta)
            self.bytes -= _bytes_of(delta)


def _bytes_of(answer: Answer) -> int:
    return _ANSWER_BYTES + _bytes_in(answer)


def _bytes_in(answer: Answer) -> int:
    """What an answer holds beside itself."""
    if isinstance(answer, Delta):
        numbers = sum(1 + len(token.top) for token in answer.logprobs)
        ids = _TOKEN_BYTES * len(answer.tokens)
        return len(answer.text.encode()) + ids + _LOGPROB_BYTES * numbers
    if isinstance(answer, Tokens):
        return _TOKEN_BYTES * len(answer.tokens)
    return len(answer.text.encode()) if isinstance(answer, Detokenized) else 0
