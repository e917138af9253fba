from __future__ import annotations

from collections.abc import Iterator

from hearth.actors.request_state import RequestState, RequestStatus
from hearth.actors.waiting_queue import WaitingQueue


class WaitingRoom:
    """All requests that wait: `unready` ones for the embeddings of images, others for a place."""

    def __init__(self, ageing_s: float) -> None:
        self.queue = WaitingQueue(ageing_s)
        self.unready = WaitingQueue(ageing_s, RequestStatus.WAITING_FOR_IMAGES)

    def __len__(self) -> int:
        return len(self.queue) + len(self.unready)

    def __iter__(self) -> Iterator[RequestState]:
        yield from self.queue
        yield from self.unready

    def __contains__(self, rid: int) -> bool:
        return rid in self.queue or rid in self.unready

    @property
    def prompt_tokens(self) -> int:
        """The prompt tokens of all of them."""
        return self.queue.prompt_tokens + self.unready.prompt_tokens

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of one of them."""
        deadlines = (self.queue.next_deadline, self.unready.next_deadline)
        return min((one for one in deadlines if one is not None), default=None)

    def tokens_of(self, client: int) -> int:
        """The prompt tokens that a client has waiting."""
        return self.queue.tokens_of(client) + self.unready.tokens_of(client)

    def push(self, entry: RequestState) -> None:
        """Add a request, behind all of its client and priority that wait for the same."""
        (self.unready if entry.images else self.queue).push(entry)

    def remove(self, rid: int) -> RequestState | None:
        """Take one request out; None when it does not wait."""
        return self.queue.remove(rid) or self.unready.remove(rid)

    def take_expired(self, now: float) -> list[RequestState]:
        """Take out the requests whose deadline has passed."""
        return self.queue.take_expired(now) + self.unready.take_expired(now)
