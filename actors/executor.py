from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable
from operator import attrgetter

import structlog

from hearth.actors.encoder_messages import RunTower, TowerFailed
from hearth.actors.executor_adapters import ExecutorAdapters
from hearth.actors.executor_messages import (
    ExecutorControl,
    ExecutorMessage,
    LoadAdapter,
    Offered,
    Release,
    Retire,
    Revoke,
    UnloadAdapter,
    Unpin,
)
from hearth.actors.executor_tower import ExecutorTower
from hearth.actors.logs import set_level
from hearth.actors.mailbox import MailboxFull, Receiver, Sender, wait_any
from hearth.actors.messages import (
    Cancel,
    Continuation,
    RowsEnded,
    RowsFailed,
    RowsPlaced,
    RowsReturned,
    SetLogLevel,
    Shutdown,
    TokenizerMessage,
)
from hearth.actors.placed_rows import PlacedRows
from hearth.actors.supervisor_messages import ActorProgress, ExecutorMetrics, SupervisorMessage
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import BatchRuntime, StepResult

SEND_TIMEOUT_S = 10.0
"""How long the tokenizer may be behind before the executor gives up."""
PROGRESS_S = 1.0
"""Seconds between two signs of progress, while working and while waiting."""
FAILURE_LIMIT = 3
"""Failures in a row that left no row, before the executor asks to be replaced by ending."""
DOUBT_S = 5.0
_PROMPTS = 2
_CERTAIN_S = 60.0
_EARLY = 4096
_LOOK_S = 0.0001
# A wait for mail counts whole milliseconds.
_WHOLE_MS = 0.001
_order = attrgetter("order")
_log = structlog.get_logger("executor")


class Doubts:
    """Tell whether the engine has to show again that it computes its model; no clock, no I/O.

    That is so where rows of two prompts or more have ended with numbers that are not finite, and
    none well between them. Rows that run when it is due have `DOUBT_S` to end, and are a good sign
    where they have not.
    """

    def __init__(self) -> None:
        self._prompts: set[int] = set()
        self._due = 0.0
        self._since: float | None = None

    def ended(self, rows: Iterable[tuple[int, bool]], now: float) -> None:
        """Rows without an adapter have ended: a hash of each one's prompt, and whether well."""
        for prompt, well in rows:
            if well:
                self._prompts.clear()
                self._since = None
            elif now >= self._due:
                self._prompts.add(prompt)
        if self._since is None and len(self._prompts) >= _PROMPTS:
            self._since = now

    def due(self, now: float) -> bool:
        """Tell whether no row is to be placed until it has been asked."""
        if self._since is not None and now - self._since > DOUBT_S:
            self.settled(now)
        return self._since is not None

    def settled(self, now: float) -> None:
        """It has been asked, or runs too well to be: it is not asked again for a while."""
        self._prompts.clear()
        self._since = None
        self._due = now + _CERTAIN_S


class ExecutorActor:
    """Steps the rows that have places, on one thread, and reads its inboxes between two steps.

    It owns the mailboxes that it is given, except `to_supervisor`. Every row that it is offered is
    answered once, under the number of this `incarnation`. `ask` has the engine give its known
    answer, or raises `wrong_answer`; None where it has none.
    """

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        inbox: Receiver[ExecutorMessage],
        control: Receiver[ExecutorControl],
        to_tokenizer: Sender[TokenizerMessage],
        to_supervisor: Sender[SupervisorMessage],
        runtime: BatchRuntime,
        tower: ExecutorTower | None = None,
        ask: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._inbox = inbox
        self._control = control
        self._to_tokenizer = to_tokenizer
        self._to_supervisor = to_supervisor
        self._runtime = runtime
        self._tower = tower or ExecutorTower(incarnation)
        self._rows = PlacedRows(incarnation)
        self._ask, self._doubts = ask, Doubts()
        self._adapters = ExecutorAdapters(name, runtime, to_supervisor)
        # In the order in which they get places.
        self._offered: list[Offered] = []
        # Placed rows that are to be given back, and whether at once.
        self._released: dict[int, bool] = {}
        # Cancelled and revoked rows that are not here, oldest first: their offer may yet come, but
        # most have ended.
        self._early: dict[int, Cancel | Revoke] = {}
        self._stopping = self._retiring = False
        self._failures = self._switches = 0
        self._reported = float("-inf")

    def run(self) -> None:
        """Work until told to stop; raises HearthError when going on makes no sense.

        That is after `device_lost` and `wrong_answer`, at once, and after a few failures in a row.
        """
        with self._inbox, self._control, self._to_tokenizer:
            while True:
                self._report()
                self._await_offer()
                self._read_control()
                self._read_offers()
                if self._stopping:
                    break
                self._change_rows()
                if self._retiring and not self._runtime.active:
                    return
                if self._runtime.active:
                    # Here, not below: a step is as few frames deep as it can be.
                    try:
                        result = self._runtime.step()
                    except Exception as error:  # noqa: BLE001 - their requests are answered
                        self._fail_all(error)
                    else:
                        self._tell_step(result)
                elif not self._offered:
                    wait_any([self._inbox, self._control], PROGRESS_S)
            self._log_failures()
            # No row goes on elsewhere.
            self._tell_failed([*self._rows, *(one.rid for one in self._offered)], _SHUTTING_DOWN)

    def _change_rows(self) -> None:
        """Give rows back, and let others take places, as far as that is due."""
        if self._released:
            self._give_back()
        if self._retiring:
            self._return_offered()
        elif self._ask is not None and self._doubts.due(time.monotonic()):
            self._ask_again(self._ask)
        elif self._offered:
            self._place()

    def _await_offer(self) -> None:
        """While a queued step runs and places are free: whoever comes now waits for no other."""
        runtime = self._runtime
        until = runtime.queue_by
        while (spare := until - time.monotonic()) > 0 and runtime.free:
            self._read_control()
            self._read_offers()
            if self._offered or self._stopping:
                return
            if spare > 2 * _WHOLE_MS:
                wait_any([self._inbox, self._control], spare - _WHOLE_MS)
            else:
                time.sleep(_LOOK_S)

    def _read_control(self) -> None:
        while (message := self._control.receive_nowait()) is not None:
            match message:
                case Cancel():
                    self._cancel(message)
                case Revoke():
                    self._revoke(message)
                case Release(rids, at_once):
                    self._released |= dict.fromkeys(rids, at_once)
                case LoadAdapter():
                    self._adapters.load(message)
                case UnloadAdapter(name):
                    self._unload(name)
                case Unpin(client):
                    self._runtime.unpin(client)
                case SetLogLevel(level):
                    set_level(level)
                case Retire() | Shutdown():
                    self._retiring = True
                    self._stopping |= isinstance(message, Shutdown)

    def _read_offers(self) -> None:
        while (message := self._inbox.receive_nowait()) is not None:
            if isinstance(message, RunTower):
                self._run_tower(message)
                continue
            for one in message.rows:
                if one.rid in self._rows or any(one.rid == it.rid for it in self._offered):
                    # Two of one number cannot be told apart: the first gets the answers.
                    continue
                early = self._early.pop(one.rid, None)
                if early is None:
                    insort(self._offered, one, key=_order)
                elif isinstance(early, Cancel):
                    self._tell(RowsEnded(self._incarnation, [one.rid]))
                else:
                    self._tell(RowsReturned(self._incarnation, unplaced=[one.rid]))

    def _run_tower(self, message: RunTower) -> None:
        try:
            self._tower.begin(message, self._runtime.run_tower)
        except HearthError as error:
            told = TowerFailed(self._incarnation, [message.number], error.code, error.message)
            self._tell(told)

    def _cancel(self, message: Cancel) -> None:
        number = self._rows.remove(message.rid)
        if number is not None:
            self._runtime.leave(number)
        elif not self._withdraw(message.rid):
            self._remember(message.rid, message)
            return
        self._tell(RowsEnded(self._incarnation, [message.rid]))

    def _revoke(self, message: Revoke) -> None:
        given_back = []
        for rid in message.rids:
            if self._withdraw(rid):
                given_back.append(rid)
            elif rid not in self._rows and rid not in self._early:
                self._remember(rid, message)
        if given_back:
            self._tell(RowsReturned(self._incarnation, unplaced=given_back))

    def _return_offered(self) -> None:
        """Another executor is to have those that have no places here."""
        if self._offered:
            unplaced = [one.rid for one in self._offered]
            self._offered = []
            self._tell(RowsReturned(self._incarnation, unplaced=unplaced))

    def _withdraw(self, rid: int) -> bool:
        """Forget an offered row; whether there was one."""
        for place, one in enumerate(self._offered):
            if one.rid == rid:
                del self._offered[place]
                return True
        return False

    def _remember(self, rid: int, message: Cancel | Revoke) -> None:
        self._early[rid] = message
        if len(self._early) > _EARLY:
            del self._early[next(iter(self._early))]

    def _ask_again(self, ask: Callable[[], None]) -> None:
        """Compare the known answer as at the start, once no row runs."""
        if self._runtime.active:
            return
        _log.warning("rows gave no finite numbers: the known answer is asked again")
        ask()
        self._doubts.settled(time.monotonic())

    def _give_back(self) -> None:
        """Let the released rows leave that have decoded for long enough."""
        unpaid, given_back = dict[int, bool](), []
        for rid, at_once in self._released.items():
            number = self._rows.number(rid)
            if number is None:
                continue
            if not at_once and not self._rows.has_paid(rid):
                unpaid[rid] = False
            elif (generated := self._runtime.release(number)) is not None:
                self._rows.remove(rid)
                given_back.append(Continuation(rid, generated))
        self._released = unpaid
        if given_back:
            # The executor works: its failures were those of others.
            self._failures = 0
            self._tell(RowsReturned(self._incarnation, given_back))

    def _place(self) -> None:
        """Let offered rows take the free places; what the runtime refuses is answered.

        Rows that run together share an adapter: others wait until there is no row any more.
        """
        free, chosen, behind = self._runtime.free, list[Offered](), list[Offered]()
        shared = self._runtime.adapter if len(self._rows) else None
        for one in self._offered:
            adapter = one.row.options.adapter
            if len(chosen) == free or (shared is not None and adapter != shared):
                behind.append(one)
                continue
            try:
                self._runtime.check(one.row)
            except HearthError as error:
                self._tell_failed([one.rid], error)
            else:
                shared = adapter
                chosen.append(one)
        self._offered = behind
        # What one may pin depends on what others have pinned: it is refused by itself.
        groups = [[one] for one in chosen if one.row.options.cache == "pin"]
        for group in [*groups, [one for one in chosen if one.row.options.cache != "pin"]]:
            if group:
                self._admit(group)

    def _admit(self, chosen: list[Offered]) -> None:
        rids, before = [one.rid for one in chosen], self._runtime.adapter
        try:
            numbers = self._runtime.admit([one.row for one in chosen])
        except Exception as error:  # noqa: BLE001 - their requests are answered
            if isinstance(error, HearthError) and error.code == "cache_full":
                self._tell_failed(rids, error)
            else:
                self._fail(rids, error)
        else:
            prompts = [_prompt_of(one) for one in chosen]
            self._rows.place(rids, numbers, time.monotonic(), prompts)
            self._switches += self._runtime.adapter != before
            self._tell(RowsPlaced(self._incarnation, rids))

    def _unload(self, name: str) -> None:
        """Forget an adapter; rows that have it end, and so do those that wait for it here."""
        gone = HearthError("adapter_unknown", f"adapter {name} was removed", "adapter")
        running = list(self._rows) if self._runtime.adapter == name else []
        for rid in running:
            number = self._rows.remove(rid)
            if number is not None:
                self._runtime.leave(number)
        waiting = [one.rid for one in self._offered if one.row.options.adapter == name]
        self._offered = [one for one in self._offered if one.rid not in waiting]
        self._tell_failed([*running, *waiting], gone)
        self._adapters.unload(name)

    def _fail_all(self, error: Exception) -> None:
        """Answer all rows and pictures: a step has failed."""
        if numbers := self._tower.numbers:
            self._tell(self._tower.failed(numbers, _as_failure(error)))
        self._fail(list(self._rows), error)

    def _tell_step(self, result: StepResult) -> None:
        """Take note of what a step gave, and tell of it."""
        for told in self._tower.ended(result.pictures):
            self._tell(told)
        placed = len(self._rows)
        failed = self._rows.take_failed(result)
        step = self._rows.record(result)
        self._doubts.ended(self._rows.ended, result.ended)
        if step is not None:
            self._tell(step)
        if result.failure is not None:
            self._fail(failed, result.failure)
        elif len(self._rows) < placed:
            self._failures = 0

    def _fail(self, rids: list[int], error: Exception) -> None:
        """Answer the requests of rows that are lost; raises where the executor cannot go on."""
        _log.error("rows failed", rids=rids, exc_info=error)
        for rid in rids:
            self._rows.remove(rid)
        self._tell_failed(rids, _as_failure(error))
        if isinstance(error, HearthError) and error.code == "device_lost":
            # Nothing can be run, freed or reset any more: only another process can go on.
            raise error
        if len(self._rows):
            return
        self._failures += 1
        if self._failures >= FAILURE_LIMIT:
            raise HearthError(
                "executor_failed",
                f"the executor failed {self._failures} times in a row: it ends",
            ) from error

    def _tell(self, message: TokenizerMessage) -> None:
        self._to_tokenizer.send_blocking(message, SEND_TIMEOUT_S)

    def _tell_failed(self, rids: list[int], error: HearthError) -> None:
        if rids:
            self._tell(RowsFailed(self._incarnation, rids, error.code, error.message, error.field))

    def _log_failures(self) -> None:
        for error in self._runtime.take_failures():
            _log.warning("the prefix cache misses pages", code=error.code, reason=error.message)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported < PROGRESS_S:
            return
        self._reported = now
        runtime = self._runtime
        self._log_failures()
        metrics = ExecutorMetrics(
            runtime.prefill_metrics,
            runtime.generation_metrics,
            runtime.speculation_metrics,
            dict(runtime.graphs),
            runtime.memory,
            runtime.device_free,
            runtime.prefix_metrics,
            runtime.adapter,
            self._switches,
            runtime.get_multimodal_metrics(),
        )
        try:
            self._to_supervisor.post(ActorProgress(self._name, metrics))
        except MailboxFull:
            # A supervisor that is behind has unread signs of progress enough.
            _log.debug("the supervisor is behind")


_SHUTTING_DOWN = HearthError("shutting_down", "the daemon stops: send the request again later")


def _prompt_of(one: Offered) -> int | None:
    """A hash of a row's prompt; None where it has an adapter."""
    row = one.row
    return None if row.options.adapter else hash(tuple(row.token_ids[: row.prompt_length]))


def _as_failure(error: Exception) -> HearthError:
    if isinstance(error, HearthError) and error.code == "device_lost":
        return HearthError(
            "executor_failed", "the device failed, the executor starts again: send it once more"
        )
    if isinstance(error, HearthError):
        return error
    if isinstance(error, MemoryError):
        return HearthError(
            "out_of_memory", "the executor has no memory left: lower capacity or max_batch"
        )
    return HearthError("executor_failed", "the executor failed: send the request again")
