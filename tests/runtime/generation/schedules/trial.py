"""Runs a schedule on a runtime, and holds the runtime to what it promises at every border."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, Literal, Protocol
from unittest.mock import patch

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.generation.runtime import LLMInferenceRuntime
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


class Place(msgspec.Struct):
    """A row at its place, and how many of its tokens the cache holds."""

    request: RowRequest
    filled: int = 0

    @property
    def left(self) -> int:
        """Tokens of the prompt that are still to be prefilled."""
        return max(0, len(self.request.token_ids) - self.filled)


class Shadow:
    """A row owner beside the others; `chunk` and `capacity` are those of the engine.

    A chunk is as wide as its longest piece, or padded to one of `widths`.
    """

    def __init__(self, places: int, chunk: int, capacity: int, widths: Sequence[int] = ()) -> None:
        self.rows: list[Place] = []
        self._places = places
        self._chunk = chunk
        self._capacity = capacity
        self._widths = widths
        self._last = ""

    @property
    def decoding(self) -> int:
        """How many rows decode."""
        return sum(not row.left for row in self.rows)

    def reorder(self, reorder: BatchReorder) -> None:
        """Move and seat rows; each target must be free by its turn."""
        places = dict(enumerate(self.rows))
        gone = set(places) - {source for source, _, _ in reorder.moves}
        moved = set[int]()
        for source, target, used in reorder.moves:
            check(source in places and source not in moved, "no row to move: {}", reorder)
            check(target not in places or target in gone, "{} is taken: {}", target, reorder)
            check(used == places[source].filled, "{} slots are kept of {}", used, places[source])
            places[target] = places.pop(source)
            gone.discard(target)
            moved.add(target)
        for place, row in reorder.assignments:
            check(place not in moved, "{} is given twice: {}", place, reorder)
            places[place] = Place(row.request, row.filled)
            moved.add(place)
        check(set(range(reorder.rows)) <= set(places), "a place is empty: {}", reorder)
        check(moved <= set(range(reorder.rows)), "a place is none: {}", reorder)
        check(reorder.rows <= self._places, "too many rows: {}", reorder)
        self.rows = [places[place] for place in range(reorder.rows)]
        left = [row.left for row in self.rows]
        check(left == sorted(left), "the prompts left are {}", left)

    def prefill(self, token_ids: NDArray[np.int64], lengths: Sequence[int], first: int) -> None:
        """A chunk of the first joiners."""
        rows, width = token_ids.shape
        chunk = self.rows[first : first + rows]
        check(first == self.decoding, "{} rows decode, a chunk begins at {}", self.decoding, first)
        check(len(chunk) == len(lengths) == rows, "a chunk of {} rows", rows)
        check(max(lengths) <= width <= self._chunk, "a chunk of {} tokens: {}", width, lengths)
        padded = width == max(lengths) or width in self._widths
        check(padded, "{} padded to {}", lengths, width)
        check(not first or self._last != "prefill", "two chunks while rows wait")
        self._last = "prefill" if first else ""
        for row, length, tokens in zip(chunk, lengths, token_ids, strict=True):
            check(0 < length <= row.left, "{} tokens of {}", length, row)
            check(row.filled + width <= self._capacity, "a chunk of {} behind {}", width, row)
            wanted = row.request.token_ids[row.filled : row.filled + length]
            check(tokens[:length].tolist() == wanted, "{} are not the next of {}", tokens, row)
            row.filled += length

    def decode(self, rows: int) -> None:
        """A decode step of the first rows."""
        self._step(rows)
        for row in self.rows[:rows]:
            row.filled += 1

    def verify(self, rows: int, width: int) -> None:
        """A round; how much of it is kept is told behind it."""
        self._step(rows)
        for row in self.rows[:rows]:
            check(row.filled + width <= self._capacity, "a tree of {} behind {}", width, row)

    def kept(self, counts: Sequence[int]) -> None:
        """How many nodes of its tree each decoding row keeps."""
        for row, nodes in zip(self.rows, counts, strict=False):
            row.filled += nodes

    def _step(self, rows: int) -> None:
        check(rows == self.decoding, "{} rows decode, not {}", self.decoding, rows)
        joiners = len(self.rows) > rows
        check(not joiners or self._last != "decode", "two decode steps while joiners wait")
        self._last = "decode" if joiners else ""


def check(promise: object, broken: str, *seen: object) -> None:
    """Raise `ViolationError` for a promise that was not kept; `seen` fills the gaps of `broken`.

    Text is made only then: it would take longer than a step.
    """
    if not promise:
        raise ViolationError(broken.format(*seen))


@contextmanager
def watching(runtime: LLMInferenceRuntime, shadow: Shadow) -> Iterator[None]:
    """Let a shadow see every reorder, and every step before it runs."""
    runner, context = runtime._runner, runtime._context
    prefill, decode = runner.execute_prefill_step, runner.execute_vanilla_decoding_step
    verify, commit = runner.execute_eagle_base_tree_decoding_step, runner.commit_path

    def prefilling(token_ids: Any, lengths: Any, first: int = 0, images: Any = ()) -> Any:
        shadow.prefill(token_ids, lengths, first)
        return prefill(token_ids, lengths, first, images)

    def decoding(rows: int) -> Any:
        shadow.decode(rows)
        return decode(rows)

    def verifying(rows: int, width: int) -> Any:
        shadow.verify(rows, width)
        return verify(rows, width)

    def committing(nodes: Any) -> Any:
        shadow.kept([len(path) for path in nodes])
        return commit(nodes)

    with ExitStack() as patches:
        for name, seen in (
            ("execute_prefill_step", prefilling),
            ("execute_vanilla_decoding_step", decoding),
            ("execute_eagle_base_tree_decoding_step", verifying),
            ("commit_path", committing),
        ):
            patches.enter_context(patch.object(runner, name, seen))
        patches.enter_context(patch.object(context, "owners", [*context.owners, shadow]))
        yield


def _fail(*_: object, **__: object) -> Any:
    raise HearthError(INJECTED, "the chunk fails")


@contextmanager
def failing_steps(runtime: LLMInferenceRuntime, schedule: Schedule) -> Iterator[None]:
    """Let the steps that the schedule names raise."""
    if schedule.fault == "none":
        yield
    else:
        failing = failing_decodes if schedule.fault == "decode" else failing_prefills
        with failing(runtime, schedule):
            yield


@contextmanager
def failing_decodes(runtime: LLMInferenceRuntime, schedule: Schedule) -> Iterator[None]:
    """Let decode steps and rounds raise behind the engine's run."""
    runner, numbers = runtime._runner, count()

    def failing(run: Callable[..., Any], *args: Any) -> Any:
        result = run(*args)
        return _fail() if next(numbers) in schedule.failing else result

    with ExitStack() as patches:
        for name in ("execute_vanilla_decoding_step", "execute_eagle_base_tree_decoding_step"):
            run = partial(failing, getattr(runner, name))
            patches.enter_context(patch.object(runner, name, run))
        yield


@contextmanager
def failing_prefills(runtime: LLMInferenceRuntime, schedule: Schedule) -> Iterator[None]:
    """Let chunks raise.

    Before the engine runs, behind it, or where the draft takes the chunk, if there is a draft.
    """
    runner, numbers = runtime._runner, count()
    run, keep = runner.execute_prefill_step, runner._steps.keep
    speculation = runtime._speculation
    follow = None if speculation is None else speculation.proposer.prefilled
    fails = runs = False

    def behind(*args: Any, **kwargs: Any) -> None:
        keep(*args, **kwargs)
        if fails and runs and (schedule.fault == "behind" or follow is None):
            _fail()

    def prefill(*args: Any, **kwargs: Any) -> Any:
        nonlocal fails, runs
        fails = next(numbers) in schedule.failing
        if fails and schedule.fault == "before":
            _fail()
        runs = True
        try:
            return run(*args, **kwargs)
        finally:
            runs = False

    def drafting(*args: Any, **kwargs: Any) -> Any:
        return _fail() if fails and schedule.fault == "draft" else follow(*args, **kwargs)  # type: ignore[misc] # there is one

    with (
        patch.object(runner, "execute_prefill_step", prefill),
        patch.object(runner._steps, "keep", behind),
    ):
        if speculation is None:
            yield
        else:
            with patch.object(speculation.proposer, "prefilled", drafting):
                yield
