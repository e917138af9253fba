"""The executor: runs the steps of its rows on one thread, and reports their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import structlog

from hearth.actors.executor.rows import ExecutorRows
from hearth.actors.executor.vision_encoder_memory import VisionEncoderMemory
from hearth.actors.logs import set_level
from hearth.actors.mailbox import MailboxFull, Receiver, Sender, wait_any
from hearth.actors.messages import (
    Encoded,
    EncodeFailed,
    ExecutorControl,
    ExecutorMessage,
    ImageTimes,
    RunVisionEncoder,
    Schedule,
    SetAdapter,
    SetLogLevel,
    Shutdown,
    TokenizerMessage,
    Unpin,
)
from hearth.actors.supervisor_messages import (
    ActorProgress,
    AdapterAnswer,
    ExecutorMetrics,
    SupervisorMessage,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import BatchRuntime, StepResult
from hearth.runtime.generation.vision_scheduler import TowerResult, TowerWork
from hearth.runtime.request import RowRequest


class ExecutorAdapters:
    """Loader of an executor's adapters, which reports each result to the supervisor."""

    def __init__(
        self, name: str, runtime: BatchRuntime, to_supervisor: Sender[SupervisorMessage]
    ) -> None:
        self._name, self._runtime, self._to_supervisor = name, runtime, to_supervisor

    def load(self, name: str, folder: Path) -> None:
        """Let rows ask for an adapter, if it can be loaded."""
        answer = AdapterAnswer(self._name, name)
        try:
            self._runtime.load_adapter(name, folder)
        except HearthError as error:
            _log.warning("an adapter is not served", adapter=name, reason=error.message)
            answer = AdapterAnswer(self._name, name, error.code, error.message, error.field)
        self._answer(answer)

    def unload(self, name: str) -> None:
        """Forget an adapter that no row has any more."""
        # One that was never loaded is gone as well.
        with suppress(HearthError):
            self._runtime.unload_adapter(name)
        self._answer(AdapterAnswer(self._name, name))

    def _answer(self, answer: AdapterAnswer) -> None:
        # A caller of a supervisor that is behind has a timeout of its own.
        with suppress(MailboxFull):
            self._to_supervisor.post(answer)


class ExecutorTower:
    """Adapter between messages about images and a runtime's vision encoder.

    Without memory there is no vision encoder, and all work is refused. Every piece of work is
    answered once.
    """

    def __init__(self, memory: VisionEncoderMemory | None = None) -> None:
        self._given = memory
        self._open: dict[int, RunVisionEncoder] = {}

    def begin(self, message: RunVisionEncoder, run: Callable[[TowerWork], None]) -> None:
        """Have the runtime `run` the work; raises its errors, and `internal` for a reused slot."""
        arrays = self._memory.arrays(message.layout, message.patches, message.target)
        run(TowerWork(message.number, message.layout, *arrays))
        self._open[message.number] = message

    def ended(self, results: Iterable[TowerResult]) -> list[Encoded | EncodeFailed]:
        """Answers for the pictures that the runtime has finished."""
        told: list[Encoded | EncodeFailed] = []
        for number, engine_s, error in results:
            message = self._open[number]
            try:
                if error is not None:
                    raise error
                self._memory.check(message.patches, message.target)
            except HearthError as failure:
                told += self.failed([number], failure)
            else:
                del self._open[number]
                told.append(Encoded(number, ImageTimes(engine_s=engine_s)))
        return told

    def failed(self, numbers: Iterable[int], error: HearthError) -> list[EncodeFailed]:
        """Answers for the open pictures of these numbers, which fail by `error`."""
        return [
            EncodeFailed(number, error.code, error.message)
            for number in numbers
            if self._open.pop(number, None) is not None
        ]

    @property
    def _memory(self) -> VisionEncoderMemory:
        if self._given is None:
            raise HearthError("internal", "this executor has no vision tower")
        return self._given

    @property
    def numbers(self) -> list[int]:
        """Numbers of the pictures that are not answered for yet."""
        return list(self._open)


SEND_TIMEOUT_S = 10.0
"""Seconds for which a send to the tokenizer may block before the executor gives up."""
PROGRESS_S = 1.0
"""Seconds between two signs of progress, while working and while waiting."""
FAILURE_LIMIT = 3
"""Failures in a row that left no row, after which the executor ends and is replaced."""
DOUBT_S = 5.0
_PROMPTS = 2
_CERTAIN_S = 60.0
_LOOK_S = 0.0001
# A wait for mail counts whole milliseconds.
_WHOLE_MS = 0.001
_log = structlog.get_logger("executor")


class Doubts:
    """Detector of an engine that gives wrong numbers, whose known answer is to be checked again.

    A check is due once rows of two prompts or more have ended with numbers that are not finite,
    and none well between them. Running rows have `DOUBT_S` seconds to end first; if some still run
    after that, the engine works. No clock, no I/O.
    """

    def __init__(self) -> None:
        self._prompts: set[int] = set()
        self._due = 0.0
        self._since: float | None = None

    def ended(self, rows: Iterable[tuple[int, bool]], now: float) -> None:
        """Record rows without an adapter that have ended: a hash of the prompt, True if well."""
        for prompt, well in rows:
            if well:
                self._prompts.clear()
                self._since = None
            elif now >= self._due:
                self._prompts.add(prompt)
        if self._since is None and len(self._prompts) >= _PROMPTS:
            self._since = now

    def due(self, now: float) -> bool:
        """Return True if no row is to be placed until the known answer has been checked."""
        if self._since is not None and now - self._since > DOUBT_S:
            self.settled(now)
        return self._since is not None

    def settled(self, now: float) -> None:
        """Record that the engine works; no check is due for `_CERTAIN_S` seconds."""
        self._prompts.clear()
        self._since = None
        self._due = now + _CERTAIN_S


class ExecutorActor:
    """The executor's loop on one thread: steps of the running rows, and messages between them.

    It owns its mailboxes, except `to_supervisor`. Its rows follow the newest schedule, and each
    output has the changes of rows, under the number of this `incarnation`. `ask` checks the
    engine's known answer, and raises `wrong_answer`; None for an engine without one.
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
        self._inbox = inbox
        self._control = control
        self._to_tokenizer = to_tokenizer
        self._to_supervisor = to_supervisor
        self._runtime = runtime
        self._tower = tower or ExecutorTower()
        self._rows = ExecutorRows(incarnation)
        self._ask, self._doubts = ask, Doubts()
        self._adapters = ExecutorAdapters(name, runtime, to_supervisor)
        self._stopping = self._retiring = False
        # Descriptor of the compiler that rows wait for.
        self._compiling: list[int] = []
        self._failures = self._switches = 0
        self._reported = float("-inf")

    def run(self) -> None:
        """Work until `Shutdown`; raises HearthError if this process cannot go on.

        That is after `device_lost` and `wrong_answer`, at once, and after `FAILURE_LIMIT` failures
        in a row.
        """
        with self._inbox, self._control, self._to_tokenizer:
            while True:
                self._report()
                self._await_rows()
                self._read_mail()
                if self._stopping:
                    break
                self._change_rows()
                if self._rows.changed:
                    self._tell()
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
                elif not self._rows.waiting:
                    wait_any([self._inbox, self._control], PROGRESS_S)
                elif self._compiling:
                    wait_any([self._inbox, self._control], PROGRESS_S, self._compiling)
            self._log_failures()
            # No row goes on elsewhere.
            self._rows.fail([*self._rows, *self._rows.waiting], _SHUTTING_DOWN)
            self._tell()

    def _change_rows(self) -> None:
        """Preempt, retire and place rows, as far as that is due."""
        self._preempt()
        if self._retiring:
            self._rows.retire()
        elif self._ask is not None and self._doubts.due(time.monotonic()):
            self._ask_again(self._ask)
        elif self._rows.waiting:
            self._place()

    def _await_rows(self) -> None:
        """Wait for rows while a queued step runs and slots are free: they join the next step."""
        runtime = self._runtime
        until = runtime.queue_by
        while (spare := until - time.monotonic()) > 0 and runtime.free:
            self._read_mail()
            if self._rows.waiting or self._stopping:
                return
            if self._rows.changed:
                self._tell()
            if spare > 2 * _WHOLE_MS:
                wait_any([self._inbox, self._control], spare - _WHOLE_MS)
            else:
                time.sleep(_LOOK_S)

    def _read_mail(self) -> None:
        self._read_control()
        while (work := self._inbox.receive_nowait()) is not None:
            match work:
                case Schedule():
                    for rid in self._rows.update(work):
                        self._runtime.leave(rid)
                    if (grammars := self._runtime.grammars) is not None:
                        waiting = self._rows.waiting.values()
                        grammars.keep_only(row.options.grammar for row in waiting)
                case RunVisionEncoder():
                    self._run_tower(work)
                case Unpin(client):
                    self._runtime.unpin(client)

    def _read_control(self) -> None:
        while (control := self._control.receive_nowait()) is not None:
            match control:
                case SetAdapter(name, None):
                    self._unload(name)
                case SetAdapter(name, str(folder)):
                    self._adapters.load(name, Path(folder))
                case SetLogLevel(level):
                    set_level(level)
                case Shutdown(after_rows):
                    self._retiring = True
                    self._stopping |= not after_rows

    def _run_tower(self, message: RunVisionEncoder) -> None:
        try:
            self._tower.begin(message, self._runtime.run_tower)
        except HearthError as error:
            self._rows.record_images([EncodeFailed(message.number, error.code, error.message)])

    def _ask_again(self, ask: Callable[[], None]) -> None:
        """Compare the known answer as at the start, once no row runs."""
        if self._runtime.active:
            return
        self._tell()
        _log.warning("rows gave no finite numbers: the known answer is asked again")
        ask()
        self._doubts.settled(time.monotonic())

    def _preempt(self) -> None:
        """Release the preempted rows that are urgent or have decoded for long enough."""
        for rid, urgent in self._rows.preempted.items():
            if (generated := self._runtime.release(rid, paid=not urgent)) is not None:
                self._rows.preempt(rid, generated)
                # The executor works: its failures were those of others.
                self._failures = 0

    def _place(self) -> None:
        """Admit waiting rows to the free slots; those that the runtime refuses fail.

        Rows that run together share an adapter: rows of another adapter wait until no row is left.
        Rows whose grammar is being compiled wait too, without keeping others back.
        """
        self._compiling, grammars = [], self._runtime.grammars
        free, chosen = self._runtime.free, dict[int, RowRequest]()
        shared = self._runtime.adapter if len(self._rows) else None
        for rid, row in list(self._rows.waiting.items()):
            adapter = row.options.adapter
            if len(chosen) == free or (shared is not None and adapter != shared):
                continue
            try:
                self._runtime.check(row)
                ready = grammars is None or grammars.ready(row.options.grammar)
            except HearthError as error:
                self._rows.fail([rid], error)
                continue
            if ready:
                shared = adapter
                chosen[rid] = row
            elif grammars is not None:
                self._compiling = [grammars.descriptor]
        # What one may pin depends on what others have pinned: it is refused by itself.
        pins = [rid for rid, row in chosen.items() if row.options.cache == "pin"]
        for group in [*([rid] for rid in pins), [rid for rid in chosen if rid not in pins]]:
            if group:
                self._admit({rid: chosen[rid] for rid in group})

    def _admit(self, chosen: dict[int, RowRequest]) -> None:
        rids, rows, before = list(chosen), list(chosen.values()), self._runtime.adapter
        try:
            self._runtime.admit(rows, rids)
        except Exception as error:  # noqa: BLE001 - their requests are answered
            if isinstance(error, HearthError) and error.code == "cache_full":
                self._rows.fail(rids, error)
            else:
                self._fail(rids, error)
        else:
            self._rows.place(rids)
            self._switches += self._runtime.adapter != before

    def _unload(self, name: str) -> None:
        """Unload an adapter; running and waiting rows that have it fail."""
        gone = HearthError("adapter_unknown", f"adapter {name} was removed", "adapter")
        running = list(self._rows) if self._runtime.adapter == name else []
        waiting = [rid for rid, row in self._rows.waiting.items() if row.options.adapter == name]
        for rid in self._rows.fail([*running, *waiting], gone):
            self._runtime.leave(rid)
        self._adapters.unload(name)

    def _fail_all(self, error: Exception) -> None:
        """Fail all rows and pictures after a step that failed."""
        self._rows.record_images(self._tower.failed(self._tower.numbers, _as_failure(error)))
        self._fail(list(self._rows), error)
        self._tell()

    def _tell_step(self, result: StepResult) -> None:
        """Record the result of a step, and send it."""
        rows = self._rows
        placed = len(rows)
        if result.pictures:
            rows.record_images(self._tower.ended(result.pictures))
        failed = rows.take_failed(result)
        rows.record(result)
        self._doubts.ended(rows.verdicts, result.ended)
        if result.failure is not None:
            self._fail(failed, result.failure)
        elif len(rows) < placed:
            self._failures = 0
        self._tell()

    def _fail(self, rids: list[int], error: Exception) -> None:
        """Fail requests; raises if the executor cannot go on."""
        _log.error("rows failed", rids=rids, exc_info=error)
        self._rows.fail(rids, _as_failure(error))
        if isinstance(error, HearthError) and error.code == "device_lost":
            # Nothing can be run, freed or reset any more: only another process can go on.
            self._tell()
            raise error
        if len(self._rows):
            return
        self._failures += 1
        if self._failures >= FAILURE_LIMIT:
            self._tell()
            raise HearthError(
                "executor_failed",
                f"the executor failed {self._failures} times in a row: it ends",
            ) from error

    def _tell(self) -> None:
        """Send the output, if something has changed since the last one."""
        output = self._rows.take_output()
        if output is not None:
            self._to_tokenizer.send_blocking(output, SEND_TIMEOUT_S)

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
