from __future__ import annotations

from collections.abc import Callable, Iterable

from actors.messages import Continuation, RequestRound, Step
from runtime.decoding.batch_runtime import StepResult


class ExecutorBatch:
    """Which request has which row of the running batch, and how long it has run; no I/O."""

    def __init__(self, number: int, rids: Iterable[int]) -> None:
        self.number = number
        self._rids = list(rids)
        self._live = {rid: row for row, rid in enumerate(self._rids)}
        self._prefill_s = 0.0
        self._decode_s = 0.0

    @property
    def live(self) -> list[int]:
        """The requests that go on."""
        return list(self._live)

    @property
    def has_paid(self) -> bool:
        """Whether the batch has decoded for as long as its prefill took.

        Rows that are put back pay their prefill again; without this, long prompts under a short
        hold limit would take turns and never get a token further.
        """
        return 0.0 < self._prefill_s <= self._decode_s

    def drop(self, rid: int) -> int | None:
        """Forget a request; its row, or None when it does not run here."""
        return self._live.pop(rid, None)

    def record(self, result: StepResult) -> Step | None:
        """Take note of a step; the message that tells of its tokens, if there are any."""
        taken = result.ended - result.started
        if result.kind == "prefill":
            self._prefill_s += taken
        else:
            self._decode_s += taken
        if not result.tokens:
            return None
        rids = [self._rids[token.row] for token in result.tokens]
        for rid, token in zip(rids, result.tokens, strict=True):
            if token.finish is not None or token.error is not None:
                self._live.pop(rid, None)
        prefill_s = self._prefill_s if result.kind == "prefill" else None
        rounds = [
            RequestRound(self._rids[one.row], one.drafted, one.accepted) for one in result.rounds
        ]
        return Step(rids, result.tokens, result.ended, prefill_s, rounds)

    def continuations(self, release: Callable[[int], list[int] | None]) -> list[Continuation]:
        """The rows that the runtime would go on with, as the scheduler takes them back."""
        given_back = ((rid, release(row)) for rid, row in self._live.items())
        return [Continuation(rid, tokens) for rid, tokens in given_back if tokens is not None]
