from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import structlog

from actors.executor_batch import ExecutorBatch
from actors.mailbox import MailboxFull, Receiver, Sender, wait_any
from actors.messages import (
    ActorProgress,
    BatchEnded,
    Cancel,
    ExecutorControl,
    ExecutorMessage,
    ExecutorMetrics,
    Release,
    RowsFailed,
    RunBatch,
    Shutdown,
    SupervisorMessage,
    TokenizerMessage,
)
from runtime.decoding.batch_runtime import BatchRuntime
from runtime.errors import HearthError
from runtime.request import RowRequest

SEND_TIMEOUT_S = 10.0
"""How long the tokenizer may be behind before the executor gives up."""
PROGRESS_S = 1.0
"""Seconds between two signs of progress, while working and while waiting."""
FAILURE_LIMIT = 3
"""Batches that may fail in a row before the executor asks to be replaced by ending."""
_EARLY_CANCELS = 1024
_log = structlog.get_logger("executor")


class ExecutorActor:
    """Runs one batch at a time on one thread, and reads its control inbox between steps.

    It owns the mailboxes that it is given, except `to_supervisor`.
    """

    def __init__(
        self,
        *,
        name: str,
        inbox: Receiver[ExecutorMessage],
        control: Receiver[ExecutorControl],
        to_tokenizer: Sender[TokenizerMessage],
        to_supervisor: Sender[SupervisorMessage],
        runtime: BatchRuntime,
    ) -> None:
        self._name = name
        self._inbox = inbox
        self._control = control
        self._to_tokenizer = to_tokenizer
        self._to_supervisor = to_supervisor
        self._runtime = runtime
        self._batch: ExecutorBatch | None = None
        # Cancels whose batch has not come yet, oldest first; most are for rows that have ended.
        self._cancelled: dict[int, None] = {}
        self._released = 0
        self._stopping = False
        self._failures = 0
        self._steps = 0
        self._reported = float("-inf")

    def run(self) -> None:
        """Work until told to stop; raises HearthError when going on makes no sense.

        That is after `device_lost`, at once, and after a few failed batches in a row.
        """
        with self._inbox, self._control, self._to_tokenizer:
            while not self._stopping:
                self._report(busy=self._batch is not None)
                self._read_control()
                if self._batch is not None:
                    self._advance(self._batch)
                elif (message := self._inbox.receive_nowait()) is not None:
                    self._take(message)
                elif not self._stopping:
                    wait_any([self._inbox, self._control], PROGRESS_S)
            self._refuse_rest()

    def _take(self, message: RunBatch) -> None:
        rows = self._servable(message.rows)
        batch = self._batch = ExecutorBatch(message.batch, rows)
        if rows:
            with self._answering(batch):
                self._runtime.admit(list(rows.values()))

    def _advance(self, batch: ExecutorBatch) -> None:
        """Run a step of the batch, or end it where nothing is left to be done."""
        released = self._released >= batch.number and batch.has_paid
        if self._stopping:
            return
        if released or not self._runtime.active:
            self._failures = 0
            self._end(batch)
            return
        step = None
        with self._answering(batch):
            step = batch.record(self._runtime.step())
            self._steps += 1
        if step is not None:
            self._to_tokenizer.send_blocking(step, SEND_TIMEOUT_S)

    def _end(self, batch: ExecutorBatch) -> None:
        unfinished = batch.continuations(self._runtime.release)
        self._batch = None
        # Behind the tokens: were it heard without them, their requests would never end.
        self._to_tokenizer.send_blocking(BatchEnded(batch.number, unfinished), SEND_TIMEOUT_S)

    @contextmanager
    def _answering(self, batch: ExecutorBatch) -> Iterator[None]:
        """Answer the batch's requests and end it when what is done with it fails."""
        try:
            yield
        except Exception as error:
            self._failures += 1
            _log.error("a batch failed", batch=batch.number, rows=len(batch.live), exc_info=error)
            self._tell_failed(batch.live, _as_failure(error))
            for rid in batch.live:
                batch.drop(rid)
            if isinstance(error, HearthError) and error.code == "device_lost":
                # Nothing can be run, freed or reset any more: only another process can go on.
                raise
            self._end(batch)
            if self._failures >= FAILURE_LIMIT:
                raise HearthError(
                    "executor_failed",
                    f"{self._failures} batches failed in a row: the executor ends",
                ) from error

    def _servable(self, rows: Mapping[int, RowRequest]) -> dict[int, RowRequest]:
        """The rows that nobody cancelled meanwhile; what the runtime refuses is answered."""
        admitted = {}
        for rid, row in rows.items():
            if rid in self._cancelled:
                del self._cancelled[rid]
                continue
            try:
                self._runtime.check(row)
            except HearthError as error:
                self._tell_failed([rid], error)
            else:
                admitted[rid] = row
        return admitted

    def _read_control(self) -> None:
        while (message := self._control.receive_nowait()) is not None:
            match message:
                case Cancel(rid):
                    self._cancel(rid)
                case Release(number):
                    # Batch numbers grow, so this also holds for a batch that is yet to come.
                    self._released = number
                case Shutdown():
                    self._stopping = True

    def _cancel(self, rid: int) -> None:
        row = self._batch.drop(rid) if self._batch is not None else None
        if row is not None:
            self._runtime.leave(row)
            return
        self._cancelled[rid] = None
        if len(self._cancelled) > _EARLY_CANCELS:
            del self._cancelled[next(iter(self._cancelled))]

    def _tell_failed(self, rids: list[int], error: HearthError) -> None:
        if rids:
            failed = RowsFailed(rids, error.code, error.message, error.field)
            self._to_tokenizer.send_blocking(failed, SEND_TIMEOUT_S)

    def _refuse_rest(self) -> None:
        """Fail what runs and what waits: the daemon stops, so no batch goes on elsewhere."""
        if self._batch is not None:
            self._tell_failed(self._batch.live, _SHUTTING_DOWN)
        while (message := self._inbox.receive_nowait()) is not None:
            self._tell_failed(list(message.rows), _SHUTTING_DOWN)

    def _report(self, *, busy: bool) -> None:
        now = time.monotonic()
        if now - self._reported < PROGRESS_S:
            return
        self._reported = now
        try:
            self._to_supervisor.post(ActorProgress(self._name, self._steps, busy, self._metrics()))
        except MailboxFull:
            # A supervisor that is behind has unread signs of progress enough.
            _log.debug("the supervisor is behind")

    def _metrics(self) -> ExecutorMetrics:
        runtime = self._runtime
        return ExecutorMetrics(
            runtime.prefill_metrics, runtime.generation_metrics, runtime.speculation_metrics
        )


_SHUTTING_DOWN = HearthError("shutting_down", "the daemon stops: send the request again later")


def _as_failure(error: Exception) -> HearthError:
    if isinstance(error, HearthError) and error.code == "device_lost":
        return HearthError(
            "executor_failed", "the device failed, the executor starts again: send it once more"
        )
    if isinstance(error, HearthError):
        return error
    if isinstance(error, MemoryError):
        return HearthError(
            "out_of_memory", "the executor has no memory left: use a smaller capacity or batch"
        )
    return HearthError("executor_failed", "the executor failed: send the request again")
