from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from hearth.actors.messages import RequestRound, Step
from hearth.runtime.generation.batch_runtime import StepResult


@dataclass(slots=True)
class _Row:
    """One request that has a place; the times of prefill and decode are those of all rows."""

    rid: int
    number: int
    placed: float
    prompt: int | None
    prefill_from: float
    prefill_s: float = 0.0
    decode_from: float | None = None


class PlacedRows:
    """Which request has which row of the runtime, and what it has paid; no I/O.

    `ended` are rows without an adapter that the last step has ended: a hash of the prompt, and
    whether the end was a good one.
    """

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._by_number: dict[int, _Row] = {}
        self._by_rid: dict[int, _Row] = {}
        self._prefill_s = 0.0
        self._decode_s = 0.0
        self.ended: list[tuple[int, bool]] = []

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: int) -> bool:
        return rid in self._by_rid

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_rid)

    def number(self, rid: int) -> int | None:
        """The number of the request's row; None when it has none."""
        row = self._by_rid.get(rid)
        return None if row is None else row.number

    def place(
        self,
        rids: Sequence[int],
        numbers: Sequence[int],
        now: float,
        prompts: Sequence[int | None] = (),
    ) -> None:
        """The runtime has admitted these requests under these numbers.

        `prompts` are hashes of the prompts of rows without an adapter.
        """
        for rid, number, prompt in zip_longest(rids, numbers, prompts):
            row = _Row(rid, number, now, prompt, self._prefill_s)
            self._by_rid[rid] = self._by_number[number] = row

    def remove(self, rid: int) -> int | None:
        """Forget a request; the number of its row, or None when it has none."""
        row = self._by_rid.pop(rid, None)
        if row is None:
            return None
        del self._by_number[row.number]
        return row.number

    def has_paid(self, rid: int) -> bool:
        """Whether the row has decoded for as long as its prefill took.

        A row that is put back pays its prefill again; without this, long prompts under a short hold
        limit would take turns and never get a token further.
        """
        row = self._by_rid[rid]
        return row.decode_from is not None and self._decode_s - row.decode_from >= row.prefill_s

    def take_failed(self, result: StepResult) -> list[int]:
        """Take out the requests whose prefill failed as a whole, and their tokens."""
        if result.failure is None:
            return []
        failed = {token.row for token in result.tokens if token.error == result.failure.code}
        result.tokens = [token for token in result.tokens if token.row not in failed]
        rids = [rid for rid, row in self._by_rid.items() if row.number in failed]
        for rid in rids:
            self.remove(rid)
        return rids

    def record(self, result: StepResult) -> Step | None:
        """Take note of a step; the message that tells of its tokens, if there are any."""
        taken = result.ended - result.started
        self.ended = []
        if result.kind == "prefill":
            self._prefill_s += taken
        elif result.kind != "tower":
            self._decode_s += taken
        if not result.tokens:
            return None
        rows = [self._by_number[token.row] for token in result.tokens]
        rids = [row.rid for row in rows]
        rounds = [
            RequestRound(self._by_number[one.row].rid, one.drafted, one.accepted)
            for one in result.rounds
        ]
        cached = {self._by_number[row].rid: tokens for row, tokens in result.cached.items()}
        placed = {}
        if result.kind == "prefill":
            for row in rows:
                row.prefill_s = self._prefill_s - row.prefill_from
                row.decode_from = self._decode_s
                placed[row.rid] = row.placed
        for row, token in zip(rows, result.tokens, strict=True):
            if token.finish is not None or token.error is not None:
                if row.prompt is not None and token.error in (None, "non_finite"):
                    self.ended.append((row.prompt, token.error is None))
                self.remove(row.rid)
        return Step(self._incarnation, rids, result.tokens, result.ended, placed, rounds, cached)
