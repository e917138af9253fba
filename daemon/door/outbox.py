"""What a client has not read yet: bounded, because a reply's deltas grow into one."""

from collections import deque

from hearth_client.protocol import Answer, Delta


class Outbox:
    """Answers of one session in order, from the first that could not be sent.

    `blocked_since` is when the session last took an answer, in seconds; meaningful while there
    are any here.
    """

    def __init__(self) -> None:
        self.blocked_since = 0.0
        self._answers: deque[Answer] = deque()
        self._deltas: dict[str, Delta] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: Answer, now: float) -> None:
        """Append an answer."""
        if not self._answers:
            self.blocked_since = now
        self._answers.append(answer)
        if isinstance(answer, Delta):
            self._deltas[answer.id] = answer

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
        return 0 if delta is None else len(delta.text) + 4 * len(delta.tokens)

    def head(self) -> Answer | None:
        """The answer to send next."""
        return self._answers[0] if self._answers else None

    def sent(self, now: float) -> None:
        """The head was taken."""
        answer = self._answers.popleft()
        self.blocked_since = now
        if isinstance(answer, Delta):
            del self._deltas[answer.id]

    def withdraw(self, request_id: str) -> None:
        """Drop the delta of a request that has failed."""
        delta = self._deltas.pop(request_id, None)
        if delta is not None:
            self._answers.remove(delta)
