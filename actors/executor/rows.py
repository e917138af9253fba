from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hearth.actors.messages import Encoded, EncodeFailed, Failed, Schedule, StepOutput
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.request import RowRequest, RowToken


class ExecutorRows:
    """The rows of an executor by its newest `Schedule`, and the next `StepOutput`; no I/O.

    Losing a `Schedule`, or getting one twice or late, changes nothing once the next has come. A row
    that has ended is remembered until the scheduler has seen the output with its end: until then a
    schedule may name the row. `verdicts` lists rows without an adapter that the last step has
    ended: a hash of the prompt, and True if the row ended well.
    """

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self.waiting: dict[int, RowRequest] = {}
        """Rows without slots, in the order in which they get slots."""
        self.preempted: dict[int, bool] = {}
        """Rows to preempt; True if they leave before they have paid for their prefill."""
        self.verdicts: list[tuple[int, bool]] = []
        self._running: dict[int, RowRequest] = {}
        # By request, the number of the output that has its end.
        self._ended: dict[int, int] = {}
        self.changed = False
        """True if there is something to send."""
        self._retiring = False
        self._output = StepOutput(incarnation, 1, 0)

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[int]:
        return iter(self._running)

    def update(self, schedule: Schedule) -> list[int]:
        """Take over a schedule, if it is the newest; returns the cancelled rows that had slots."""
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
        return [rid for rid in schedule.cancelled if self._remove(rid)]

    def preempt(self, rid: int, generated: list[int]) -> None:
        """Record that a row has left with these tokens."""
        self._remove(rid)
        self._output.preempted[rid] = generated
        self.changed = True

    def place(self, rids: Sequence[int]) -> None:
        """Record that the runtime has admitted these rows."""
        for rid in rids:
            self._running[rid] = self.waiting.pop(rid)
        self._output.placed += rids
        self.changed = True

    def fail(self, rids: Iterable[int], error: HearthError) -> list[int]:
        """Record that these rows have failed; returns the rows that had slots."""
        failed = list(rids)
        if not failed:
            return []
        self._output.failed.append(Failed(failed, error.code, error.message, error.field))
        self.changed = True
        return [rid for rid in failed if self._remove(rid)]

    def retire(self) -> None:
        """Give up the rows that have no slots, now and from now on."""
        if not self._retiring:
            self.waiting = {}
            self._retiring = self._output.retiring = self.changed = True

    def record_images(self, results: Iterable[Encoded | EncodeFailed]) -> None:
        """Record results of images."""
        told = list(results)
        self._output.images += told
        self.changed |= bool(told)

    def take_failed(self, result: StepResult) -> list[int]:
        """Remove the tokens of requests whose prefill failed as a whole; returns these requests."""
        if result.failure is None:
            return []
        failed = {token.row for token in result.tokens if token.error == result.failure.code}
        result.tokens = [token for token in result.tokens if token.row not in failed]
        return [rid for rid in self._running if rid in failed]

    def record(self, result: StepResult) -> None:
        """Record the result of a step."""
        self.verdicts = []
        self._output.rounds += result.rounds
        self._output.cached |= result.cached
        if result.tokens:
            self.record_tokens(result.tokens, result.ended, result.slot_times)

    def record_tokens(
        self, tokens: list[RowToken], ended: float, slot_times: dict[int, float]
    ) -> None:
        """Record tokens, and rows that end with them; rows in `slot_times` had none before."""
        output = self._output
        output.tokens, output.ended, output.slot_times = tokens, ended, slot_times
        self.changed = True
        for token in tokens:
            if token.finish is not None or token.error is not None:
                row = self._running[token.row]
                if not row.options.adapter and token.error in (None, "non_finite"):
                    prompt = hash(tuple(row.token_ids[: row.prompt_length]))
                    self.verdicts.append((prompt, token.error is None))
                output.finished.append(token.row)
                self._remove(token.row)

    def take_output(self) -> StepOutput | None:
        """Return the output to send now; None if nothing has changed since the last one."""
        if not self.changed:
            return None
        output, self.changed = self._output, False
        self._output = StepOutput(self._incarnation, output.number + 1, output.seq)
        return output

    def _remove(self, rid: int) -> bool:
        """Forget a row until the scheduler names it anew; True if it had a slot."""
        self.waiting.pop(rid, None)
        self._ended[rid] = self._output.number
        return self._running.pop(rid, None) is not None
