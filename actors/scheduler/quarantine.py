from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from hearth.actors.scheduler.request_state import RequestState

SUSPECTS = 1024
"""Number of requests that are remembered; of more the oldest are forgotten."""
MEMORY_S = 600.0
"""Seconds after which a failure is forgotten."""
_GUILTY = 2


class Quarantine:
    """Record of requests that ran, or were offered, when the executor failed; no clock, no I/O.

    Each of these requests may be the cause, so it runs alone when it is sent again, and is cleared
    when it ends well. A request that fails again has failed alone: it is guilty. Requests are
    compared by a digest of tokens, images and options without the seed, which the front door
    chooses if none is given.
    """

    def __init__(self) -> None:
        # By digest, the latest failure last: number of failures, and time of the last one.
        self._failures: dict[bytes, tuple[int, float]] = {}

    def failed(self, entries: Iterable[RequestState], now: float) -> None:
        """Record that the executor failed while it had these requests."""
        for digest in {_digest(entry) for entry in entries}:
            times, _ = self._failures.pop(digest, (0, now))
            self._failures[digest] = (times + 1, now)
        while len(self._failures) > SUSPECTS:
            del self._failures[next(iter(self._failures))]

    def ended(self, entry: RequestState) -> None:
        """Clear a request that ended without a failure of the executor."""
        if self._failures:
            self._failures.pop(_digest(entry), None)

    def forget(self, now: float) -> None:
        """Forget failures that are `MEMORY_S` old."""
        while self._failures:
            oldest = next(iter(self._failures))
            if now - self._failures[oldest][1] < MEMORY_S:
                return
            del self._failures[oldest]

    def runs_alone(self, entry: RequestState) -> bool:
        """True if the request may have failed the executor."""
        return self._times(entry) > 0

    def is_guilty(self, entry: RequestState) -> bool:
        """True if the executor failed each time that the request ran, at least twice."""
        return self._times(entry) >= _GUILTY

    def _times(self, entry: RequestState) -> int:
        return self._failures.get(_digest(entry), (0, 0.0))[0] if self._failures else 0


def _digest(entry: RequestState) -> bytes:
    if not entry.digest:
        options = msgspec.structs.replace(entry.request.options, seed=None)
        images = [image.work.key for image in entry.images]
        asked = msgspec.msgpack.encode((entry.request.token_ids, options, images))
        entry.digest = hashlib.blake2b(asked, digest_size=16).digest()
    return entry.digest
