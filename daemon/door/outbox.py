"""What a client has not read yet: bounded, because a reply's deltas grow into one."""

from collections import deque

from hearth_client.protocol import Answer, Delta, Detokenized, Done, Error, Tokens

_TOKEN_BYTES = 4
_LOGPROB_BYTES = 16


class Outbox:
    """Answers of one session in order, from the first that could not be sent.

    `blocked_since` is when the session last took an answer, in seconds; meaningful while there
    are any here. `conversion_bytes` is about how much the answers here hold that are no replies.
    """

    def __init__(self) -> None:
        self.blocked_since = 0.0
        self.conversion_bytes = 0
        self._answers: deque[Answer] = deque()
        self._deltas: dict[str, Delta] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: Answer, now: float) -> None:
        """Append an answer."""
        if not self._answers:
            self.blocked_since = now
        self._answers.append(answer)
        self.conversion_bytes += _conversion_bytes(answer)
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
        return True

    def waiting_bytes(self, request_id: str) -> int:
        """About how much of a request's reply waits here."""
        delta = self._deltas.get(request_id)
        if delta is None:
            return 0
        # All tokens of a reply have as many alternatives as the last.
        numbers = len(delta.logprobs) * (1 + len(delta.logprobs[-1].top)) if delta.logprobs else 0
        return len(delta.text) + _TOKEN_BYTES * len(delta.tokens) + _LOGPROB_BYTES * numbers

    def head(self) -> Answer | None:
        """The answer to send next."""
        return self._answers[0] if self._answers else None

    def sent(self, now: float) -> None:
        """The head was taken."""
        answer = self._answers.popleft()
        self.blocked_since = now
        self.conversion_bytes -= _conversion_bytes(answer)
        if isinstance(answer, Delta) and self._deltas.get(answer.id) is answer:
            del self._deltas[answer.id]

    def withdraw(self, request_id: str) -> None:
        """Drop the delta of a request that has failed."""
        delta = self._deltas.pop(request_id, None)
        if delta is not None:
            self._answers.remove(delta)


def _conversion_bytes(answer: Answer) -> int:
    if isinstance(answer, Tokens):
        return _TOKEN_BYTES * len(answer.tokens)
    return len(answer.text) if isinstance(answer, Detokenized) else 0
