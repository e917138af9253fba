"""Runs a schedule on a runtime, and holds the runtime to what it promises at every border."""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.request import RowRequest, RowToken
from tests.runtime.generation.schedules.schedule import PlannedRow, Schedule

MOST_BORDERS = 4000
INJECTED: Literal["executor_failed"] = "executor_failed"


class ViolationError(AssertionError):
    """A runtime broke a promise."""


class JoiningRuntime(Protocol):
    """What a trial asks of a runtime."""

    @property
    def max_batch(self) -> int:
        """The most rows that run together."""

    @property
    def free(self) -> int:
        """Places that rows can take before the next step."""

    @property
    def active(self) -> bool:
        """Whether a row goes on."""

    def admit(self, rows: Sequence[RowRequest]) -> list[int]:
        """Take rows, all or none, and give their numbers."""

    def step(self) -> StepResult:
        """Run one step."""

    def leave(self, row: int) -> None:
        """Let a row leave; nothing more is reported for it."""

    def release(self, row: int) -> list[int] | None:
        """Let a row leave that would go on, with its tokens beyond the prompt."""


class Reply(msgspec.Struct):
    """What one row got. `end` is "stop", "length", "cancelled" or the code of a failure."""

    tokens: list[RowToken] = []
    end: str = ""
    placed: int = 0
    """How often it took a place."""


class _Row(msgspec.Struct):
    plan: PlannedRow
    request: RowRequest
    due: int
    reply: Reply
    steps: int = 0
    """Since it was placed."""
    given: int = 0
    """Tokens since it was placed."""
    absences: int = 0
    """How often it was released."""

    def again(self) -> RowRequest:
        """The request with all tokens that were reported."""
        tokens = [token.token_id for token in self.reply.tokens]
        return structs.replace(self.request, token_ids=self.request.token_ids + tokens)


class Trial:
    """One schedule on one runtime, which must be empty; `requests` are those of the planned rows.

    `ahead` is how many steps the runtime queues before it reads tokens.
    """

    def __init__(
        self,
        runtime: JoiningRuntime,
        schedule: Schedule,
        requests: Sequence[RowRequest],
        ahead: int = 0,
    ) -> None:
        self._runtime = runtime
        self._schedule = schedule
        self._ahead = ahead
        pairs = zip(schedule.rows, requests, strict=True)
        self._rows = [_Row(plan, request, plan.arrives, Reply()) for plan, request in pairs]
        self._placed: dict[int, _Row] = {}
        self._waiting = list(self._rows)
        self.steps = 0

    def run(self) -> list[Reply]:
        """Step until every row has ended; raises `ViolationError`."""
        border = 0
        self._check(self._runtime.free == self._runtime.max_batch, "an empty house is not free")
        while self._waiting or self._placed:
            self._check(border < MOST_BORDERS, "the schedule does not end")
            self._let_leave(border)
            self._admit(border)
            active = self._runtime.active
            self._check(active == bool(self._placed), "active is {}: {}", active, self._placed)
            if active:
                self._step()
            border += 1
        self._check(not self._runtime.active, "active after the last row")
        self._check(self._runtime.free == self._runtime.max_batch, "places are lost")
        return [row.reply for row in self._rows]

    def _let_leave(self, border: int) -> None:
        for number, row in list(self._placed.items()):
            absences = row.plan.absences[row.absences :]
            if absences and absences[0].after <= row.steps:
                self._release(number, row, border + absences[0].away)
            elif not absences and row.plan.cancel is not None and row.plan.cancel <= row.steps:
                self._runtime.leave(number)
                self._end(number, "cancelled")

    def _release(self, number: int, row: _Row, due: int) -> None:
        row.absences += 1
        tokens = self._runtime.release(number)
        if tokens is None:
            # Its last token is queued and unread.
            self._check(self._ahead > 0, "row {} is said to have ended", number)
            return
        known = [token.token_id for token in row.reply.tokens]
        self._check(
            tokens == known, "row {} reported {} and came back with {}", number, known, tokens
        )
        del self._placed[number]
        row.due = due
        self._waiting.append(row)

    def _admit(self, border: int) -> None:
        free = self._runtime.free
        taken = len(self._placed)
        most = self._runtime.max_batch if self._ahead else self._runtime.max_batch - taken
        self._check(0 <= free <= most, "{} places are free beside {} rows", free, taken)
        self._check(taken > 0 or free == self._runtime.max_batch, "{} free, none is taken", free)
        if border in self._schedule.overfull:
            self._overfill(free)
        due = [row for row in self._waiting if row.due <= border][:free]
        for rows in [due] if self._schedule.together and due else [[row] for row in due]:
            if self._runtime.free < len(rows):
                # A newcomer closed the house to those behind it.
                self._check(not self._schedule.together, "free places were not kept")
                return
            self._place(rows)

    def _place(self, rows: Sequence[_Row]) -> None:
        numbers = self._runtime.admit([row.again() for row in rows])
        fresh = len(numbers) == len(rows) == len(set(numbers).difference(self._placed))
        self._check(fresh, "{} rows got the numbers {}", len(rows), numbers)
        for number, row in zip(numbers, rows, strict=True):
            self._waiting.remove(row)
            self._placed[number] = row
            row.steps = row.given = 0
            row.reply.placed += 1

    def _overfill(self, free: int) -> None:
        rows = [row.again() for row in (self._waiting or [*self._placed.values()])[:1]]
        if not rows:
            return
        try:
            numbers = self._runtime.admit(rows * (free + 1))
        except HearthError:
            self._check(self._runtime.free == free, "a refusal changed what is free")
            return
        self._fail(f"{free + 1} rows were let into {free} places: {numbers}")

    def _step(self) -> None:
        try:
            result = self._runtime.step()
        except HearthError as error:
            told = self._schedule.fault == "decode" and error.code == INJECTED
            self._check(told, "a step raised: {}", error)
            for number in list(self._placed):
                self._end(number, INJECTED)
        else:
            self._take(result)

    def _take(self, result: StepResult) -> None:
        self.steps += 1
        failure = result.failure
        if failure is not None:
            told = self._schedule.fault not in {"none", "decode"}
            self._check(told, "a step failed: {}", failure)
        for row in self._placed.values():
            row.steps += 1
        for token in result.tokens:
            row_of = self._placed.get(token.row)
            if row_of is None:
                self._fail(f"token {token} of a row that is not there")
            elif token.error is not None:
                joins = failure is not None and token.error == failure.code and not row_of.given
                told = token.error == "non_finite" or joins
                self._check(told, "row {} failed by {} beside {}", token.row, token.error, failure)
                self._end(token.row, token.error)
            else:
                row_of.reply.tokens.append(token)
                row_of.given += 1
                if token.finish is not None:
                    self._end(token.row, token.finish)

    def _end(self, number: int, end: str) -> None:
        self._placed.pop(number).reply.end = end

    def _check(self, promise: object, broken: str, *seen: object) -> None:
        # Text is made only where it is raised: it would take longer than a step.
        if not promise:
            self._fail(broken.format(*seen))

    def _fail(self, broken: str) -> None:
        raise ViolationError(f"after {self.steps} steps: {broken}")
