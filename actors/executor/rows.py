from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from msgspec import structs

from hearth.actors.messages import Encoded, EncodeFailed, Failed, Schedule, StepOutput
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.request import RowRequest, RowToken


@dataclass(slots=True)
class _Row:
    """One running request; its times of prefill and decode are those of all rows."""

    rid: int
    number: int
    placed: float
    prompt: int | None
    prefill_from: float
    prefill_s: float = 0.0
    decode_from: float | None = None


class ExecutorRows:
    """The rows of an executor by its newest `Schedule`, and the next `StepOutput`; no I/O.

    Losing a `Schedule`, or getting one twice or late, changes nothing once the next has come. A row
    that has ended is remembered until the scheduler has seen the output with its end: until then a
    schedule may name the row. `verdicts` are rows without an adapter that the last step has ended:
    a hash of the prompt, and True if the end was a good one.
    """

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self.waiting: dict[int, RowRequest] = {}
        """Rows without slots, in the order in which they get them."""
        self.preempted: dict[int, bool] = {}
        """Rows to preempt; True if they leave before they have paid for their prefill."""
        self.verdicts: list[tuple[int, bool]] = []
        self._running: dict[int, _Row] = {}
        self._by_number: dict[int, _Row] = {}
        # By request, the number of the output that has its end.
        self._ended: dict[int, int] = {}
        self._prefill_s = self._decode_s = 0.0
        self.changed = False
        """True if there is something to send."""
        self._retiring = False
        self._output = StepOutput(incarnation, 1, 0)

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[int]:
        return iter(self._running)

    def update(self, schedule: Schedule) -> list[int]:
        """Take over a schedule, if it is the newest; the row numbers of cancelled requests."""
        if schedule.incarnation != self._incarnation or schedule.seq <= self._output.seq:
            return []
        self._output.seq, self.changed = schedule.seq, True
        self._ended = {rid: told for rid, told in self._ended.items() if told > schedule.heard}
        known, self.waiting, self._output.missing = self.waiting, {}, []
        for rid in [] if self._retiring else schedule.rows:
            if rid in self._running or rid in self._ended:
                continue
            row = schedule.new.get(rid) or known.get(rid)
            if row is None:
                self._output.missing.append(rid)
            else:
                self.waiting[rid] = row
        self.preempted = dict.fromkeys(schedule.preempted, False)
        self.preempted |= dict.fromkeys(schedule.urgent, True)
        return [number for rid in schedule.cancelled if (number := self._remove(rid)) is not None]

    def number(self, rid: int) -> int | None:
        """Return the number of a request's row; None if it has no slot."""
        row = self._running.get(rid)
        return None if row is None else row.number

    def has_paid(self, rid: int) -> bool:
        """Return True if a row has decoded for as long as its prefill took.

        A row that is put back pays its prefill again; without this, long prompts under a short hold
        limit would take turns and never get a token further.
        """
        row = self._running[rid]
        return row.decode_from is not None and self._decode_s - row.decode_from >= row.prefill_s

    def preempt(self, rid: int, generated: list[int]) -> None:
        """Record that a row has left with these tokens."""
        self._remove(rid)
        self._output.preempted[rid] = generated
        self.changed = True

    def place(
        self,
        rids: Sequence[int],
        numbers: Sequence[int],
        now: float,
        prompts: Sequence[int | None] = (),
    ) -> None:
        """Record that the runtime has admitted these requests under these numbers.

        `prompts` are hashes of the prompts of rows without an adapter.
        """
        for rid, number, prompt in zip_longest(rids, numbers, prompts):
            del self.waiting[rid]
            row = _Row(rid, number, now, prompt, self._prefill_s)
            self._running[rid] = self._by_number[number] = row
        self._output.placed += rids
        self.changed = True

    def fail(self, rids: Iterable[int], error: HearthError) -> list[int]:
        """Record that these rows have failed; the numbers of those that had slots."""
        failed = list(rids)
        if not failed:
            return []
        self._output.failed.append(Failed(failed, error.code, error.message, error.field))
        self.changed = True
        return [number for rid in failed if (number := self._remove(rid)) is not None]

    def retire(self) -> None:
        """Give up the rows that have no slots, now and from now on."""
        if not self._retiring:
            self.waiting = {}
            self._retiring = self._output.retiring = self.changed = True

    def embed(self, results: Iterable[Encoded | EncodeFailed]) -> None:
        """Record results of images."""
        told = list(results)
        self._output.images += told
        self.changed |= bool(told)

    def take_failed(self, result: StepResult) -> list[int]:
        """Remove the tokens of requests whose prefill failed as a whole; these requests."""
        if result.failure is None:
            return []
        failed = {token.row for token in result.tokens if token.error == result.failure.code}
        result.tokens = [token for token in result.tokens if token.row not in failed]
        return [rid for rid, row in self._running.items() if row.number in failed]

    def record(self, result: StepResult) -> None:
        """Record the tokens and the duration of a step."""
        taken = result.ended - result.started
        self.verdicts = []
        begun: dict[int, float] = {}
        if result.kind == "prefill":
            self._prefill_s += taken
            for row in [self._by_number[token.row] for token in result.tokens]:
                row.prefill_s = self._prefill_s - row.prefill_from
                row.decode_from = self._decode_s
                begun[row.rid] = row.placed
        elif result.kind != "tower":
            self._decode_s += taken
        for one in result.rounds:
            self._output.rounds.append(structs.replace(one, row=self._by_number[one.row].rid))
        for number, tokens in result.cached.items():
            self._output.cached[self._by_number[number].rid] = tokens
        if result.tokens:
            self.generate(result.tokens, result.ended, begun)

    def generate(self, tokens: list[RowToken], ended: float, begun: dict[int, float]) -> None:
        """Record tokens, and rows that end with them; `begun` rows had none before."""
        output, rows = self._output, [self._by_number[token.row] for token in tokens]
        output.rids, output.tokens = [row.rid for row in rows], tokens
        output.ended, output.begun = ended, begun
        self.changed = True
        for row, token in zip(rows, tokens, strict=True):
            if token.finish is not None or token.error is not None:
                if row.prompt is not None and token.error in (None, "non_finite"):
                    self.verdicts.append((row.prompt, token.error is None))
                output.finished.append(row.rid)
                self._remove(row.rid)

    def take_output(self) -> StepOutput | None:
        """Return the output to send now; None if nothing has changed since the last one."""
        if not self.changed:
            return None
        output, self.changed = self._output, False
        self._output = StepOutput(self._incarnation, output.number + 1, output.seq)
        return output

    def _remove(self, rid: int) -> int | None:
        """Forget a row until the scheduler names it anew; its number, if it had a slot."""
        self.waiting.pop(rid, None)
        self._ended[rid] = self._output.number
        row = self._running.pop(rid, None)
        if row is None:
            return None
        del self._by_number[row.number]
        return row.number
