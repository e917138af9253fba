from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from hearth.actors.messages import (
    Accepted,
    ExecutorLimits,
    ExecutorReady,
    Failed,
    Request,
    RowsCut,
    Schedule,
    SchedulerReport,
    StepOutput,
    Unpin,
)
from hearth.actors.scheduler import encoder_scheduler
from hearth.actors.scheduler.admission import (
    ADAPTER_GONE,
    EXPIRED,
    GUILTY,
    Refusal,
    queue_refusal,
    size_refusal,
)
from hearth.actors.scheduler.encoder_scheduler import EncoderScheduler, ImageArenas
from hearth.actors.scheduler.fair_share import FairShare, FairShareClaim
from hearth.actors.scheduler.lora import LoRAScheduler
from hearth.actors.scheduler.offers import Offers
from hearth.actors.scheduler.quarantine import Quarantine
from hearth.actors.scheduler.request_state import RequestState, RequestStatus
from hearth.actors.scheduler.running_set import RunningSet, withdraw
from hearth.actors.scheduler.waiting_queue import RequestQueues, WaitingQueue
from hearth.actors.settings import PolicySettings, Reloadable

ALONE_S = 2.0
"""Most seconds for which a request that runs alone waits for slots, or keeps slots from others."""


class Preemption:
    """Choice of the rows to preempt for waiting requests, and of the time; no clock, no I/O.

    If all slots are taken one row after the other is preempted for the first waiting request. All
    rows are preempted for a request that runs alone, and for the next synchronous batch.
    """

    def __init__(self, running: RunningSet, queue: WaitingQueue, quarantine: Quarantine) -> None:
        self._running, self._queue, self._quarantine = running, queue, quarantine

    def times(self, *, synchronous: bool) -> list[float]:
        """Times at which rows may be preempted."""
        clearing = self._clearing_times(synchronous=synchronous)
        return [time for time, _ in (*clearing, *self._yielding_times(synchronous=synchronous))]

    def act(self, now: float, *, synchronous: bool) -> None:
        """Preempt the rows whose time has come."""
        # Again for prefilling rows: they are chosen once all others have been preempted.
        while due := [
            row for time, row in self._clearing_times(synchronous=synchronous) if time <= now
        ]:
            for row in due:
                row.set_status(RequestStatus.PREEMPTING)
        # One after the other: the next one is preempted for the next that waits.
        while ready := [
            row for time, row in self._yielding_times(synchronous=synchronous) if time <= now
        ]:
            # A row that has not paid stays until it has, so it would free no slot yet.
            row = min(
                ready, key=lambda one: (max(one.paid, now), one.priority, one.placed_at or 0.0)
            )
            row.behind = self._running.behind(row)
            row.set_status(RequestStatus.PREEMPTING)

    def _clearing_times(self, *, synchronous: bool) -> list[tuple[float, RequestState]]:
        """Times at which rows leave to free all slots, for a suspect or the next batch."""
        first, running = self._queue.first, self._running
        if first is None:
            return []
        if synchronous:
            return running.batch_release_times(self._queue.order)
        if running.closed or self._quarantine.runs_alone(first):
            return running.release_times(self._queue.order, first.priority, ALONE_S)
        return []

    def _yielding_times(self, *, synchronous: bool) -> list[tuple[float, RequestState]]:
        """Times at which a row is preempted for the first that waits, if all slots are taken."""
        first = None if synchronous else self._running.next_in()
        if first is None:
            return []
        return self._running.release_times(first.arrival, first.priority)


RESEND_S = 1.0
"""Seconds after which an unseen schedule is sent once more: it may have been dropped."""


class Dispatcher:
    """Writer of one executor's schedules; tracks what the executor has seen; no clock, no I/O.

    Each schedule is complete, by the status of the rows; a new one is written once a row has a
    status that no schedule has carried.
    """

    def __init__(self, running: RunningSet) -> None:
        self._running = running
        # The executor's number; None while there is none.
        self._incarnation: int | None = None
        # Numbers of the last schedule written, the last one seen, and the last output received.
        self._seq = self._seen = self._heard = 0
        self._resend = 0.0

    def executor_ready(self, incarnation: int) -> None:
        """Begin anew with an executor that knows nothing."""
        self._incarnation = incarnation
        self._seq = self._seen = self._heard = 0

    def executor_lost(self) -> None:
        """Write nothing until the next executor is ready."""
        self._incarnation = None

    @property
    def due(self) -> float | None:
        """The time at which the last schedule is sent once more; None if it has been seen."""
        return None if self._incarnation is None or self._seen == self._seq else self._resend

    def is_news(self, output: StepOutput) -> bool:
        """Record an output; False if it is late, comes twice or is of another executor."""
        if output.incarnation != self._incarnation or output.number <= self._heard:
            return False
        self._heard, self._seen = output.number, min(max(output.seq, self._seen), self._seq)
        for rid in output.missing:
            row = self._running.get(rid)
            if row is not None and row.seq is not None and row.seq <= output.seq:
                row.seq = None
        return True

    def given_up(self, output: StepOutput) -> list[RequestState]:
        """The rows that have left by this output, as it has seen the schedule that ends them.

        They are withdrawn without having got slots, or are cancelled.
        """
        return [row for row in self._running if _is_given_up(row, output)]

    def next(self, now: float) -> Schedule | None:
        """The schedule to send now; None if the last one is current and not due again."""
        if self._incarnation is None:
            return None
        news = [row for row in self._running if row.seq is None]
        unseen = self._seen < self._seq and self._resend <= now
        if not news and not unseen:
            return None
        self._seq, self._resend = self._seq + 1, now + RESEND_S
        for row in news:
            row.seq = self._seq
        offered = self._running.offered
        return Schedule(
            self._incarnation,
            self._seq,
            self._heard,
            rows=[row.rid for row in offered],
            new={row.rid: row.to_row() for row in offered if row.seq == self._seq},
            preempted=self._with(RequestStatus.PREEMPTING),
            urgent=self._with(RequestStatus.PREEMPTING_AT_ONCE),
            cancelled=self._with(RequestStatus.CANCELLING),
        )

    def _with(self, status: RequestStatus) -> list[int]:
        return [row.rid for row in self._running if row.status is status]


def _is_given_up(row: RequestState, output: StepOutput) -> bool:
    if row.status is RequestStatus.OFFERED:
        return output.retiring
    seen = output.seq >= row.seq if row.seq is not None else False
    if row.status is RequestStatus.WITHDRAWING:
        return seen or output.retiring
    return row.status is RequestStatus.CANCELLING and (
        seen or (output.retiring and not row.has_slot)
    )


Decision = Accepted | Failed | RowsCut | Schedule | Unpin | SchedulerReport | encoder_scheduler.Sent
"""Decisions of the policy: Accepted, Embedded and SchedulerReport go to the front door, Failed and
RowsCut to the tokenizer, Encode and DropWork to the encoder, the others to the executor.
"""

_LOOK_S = 1.0
"""Seconds between two comparisons of the shares of clients while requests wait."""


class SchedulerPolicy:
    """The scheduling policy: requests, outputs and clock in, decisions out; no I/O.

    Feed it events, then `tick`: only `tick` offers, preempts and expires. It offers the executor as
    many rows as that has slots, in the order of the queue, and the executor places them as slots
    get free. If all slots are taken, a row is preempted for the first request that waits: once the
    row has had its slot for `hold_s`, and it is queued as if it had just come; or at once for a
    higher priority, and it is queued right behind that request. With synchronous batches no row is
    offered while one runs, and all rows are preempted together.
    """

    def __init__(self, settings: PolicySettings, arenas: ImageArenas | None = None) -> None:
        self._settings = Reloadable(settings)
        self._queues = RequestQueues(settings.ageing_s)
        self._queue = self._queues.queue
        self._running = RunningSet(self._settings)
        self._dispatcher = Dispatcher(self._running)
        self._lora = LoRAScheduler(self._running, self._queue, self._settings)
        self._fair_share = FairShare(self._running, self._queue, self._lora)
        self._quarantine = Quarantine()
        # Further replies, admitted with the first one, by its number.
        self._siblings: dict[int, list[RequestState]] = {}
        self._images = EncoderScheduler(self._queues, self._quarantine, arenas)
        self._preemption = Preemption(self._running, self._queue, self._quarantine)
        self._offers = Offers(
            self._running, self._queue, self._quarantine, self._lora, self._settings
        )
        self._limits: ExecutorLimits | None = None
        self._present = False
        self._gone: list[Unpin] = []
        self._ticked = 0.0
        self._rows = self._requeued = self._refused = 0

    def adopt(self, settings: PolicySettings) -> None:
        """Take over other settings, all but `ageing_s`, by which the queue is ordered.

        Admitted requests stay, also beyond lower limits.
        """
        self._settings.current = settings

    def submit(self, request: Request, now: float) -> list[Decision]:
        """Admit a request with all of its replies, or refuse it; the same number twice is ignored.

        The further replies are queued once the first one has a token, or has ended: their prompt is
        in the prefix cache then. Begun together each would compute it.
        """
        rids = [request.rid, *request.siblings]
        if any(map(self._is_open, rids)) or len(set(rids)) < len(rids):
            return []
        entry = RequestState(request, now)
        refusal = size_refusal(entry, self._settings.current, self._limits)
        if refusal is None and request.deadline is not None and request.deadline <= now:
            refusal = EXPIRED
        self._quarantine.forget(now)
        if refusal is None and self._quarantine.is_guilty(entry):
            refusal = GUILTY
        own = self._tokens_of(request.client)
        refusal = refusal or queue_refusal(entry, *self._waiting(), own, self._settings.current)
        share = self._settings.current.client_queue_share
        siblings = entry.siblings
        for one in (entry, *siblings):
            refusal = refusal or self._images.admit(one, self._is_open, share)
        if refusal is not None:
            self._refused += 1
            return [_failed(rids, refusal)]
        if siblings:
            self._siblings[request.rid] = siblings
        self._offers.arrived(now)
        self._queues.push(entry)
        return self._accept(entry) if self._limits else []

    def cancel(self, rid: int) -> None:
        """Forget a request; one that the executor has is cancelled there."""
        # Not with the first one, which may have ended by a stop string: the door cancels each.
        for siblings in self._siblings.values():
            siblings[:] = [one for one in siblings if one.rid != rid]
        self._siblings = {first: rest for first, rest in self._siblings.items() if rest}
        if self._queues.remove(rid) is not None:
            return
        row = self._running.get(rid)
        if row is not None and not row.ends:
            row.set_status(RequestStatus.CANCELLING)

    def client_gone(self, client: int) -> None:
        """Have the executor release the pins of a client, after all of its requests."""
        # One that comes later has no pins.
        if self._present:
            self._gone.append(Unpin(client))

    def adapter_gone(self, name: str) -> list[Decision]:
        """Fail requests that wait for a removed adapter; the executor fails its own rows."""
        rids = [entry.rid for entry in self._queues if entry.adapter == name]
        for rid in rids:
            self._queues.remove(rid)
        return [_failed(rids, ADAPTER_GONE)] if rids else []

    def update(self, output: StepOutput, now: float) -> list[Decision]:
        """Apply the changes of the executor's rows, unless the output is late or comes twice.

        Preempted rows are queued by `behind`; rows without slots keep their order in the queue.
        """
        if not self._dispatcher.is_news(output):
            return []
        if output.retiring:
            self.executor_retires()
        for row in self._dispatcher.given_up(output):
            self._leave(row, now)
            if not row.ends:
                self._queue.push(row)
        for row in self._rows_of(output.preempted):
            self._requeue(row, output.preempted[row.rid], now)
        for row in self._rows_of(output.slot_times):
            if row.rid not in output.finished:
                row.first_token_at = now
                self._lora.note_first_token(row, now)
            self._queue_siblings(row.rid)
        for row in self._rows_of(output.finished):
            self._queue_siblings(row.rid)
            self._leave(row, now)
        suspects = self._rows_failed(output.failed, now)
        for row in self._rows_of(output.placed):
            self._place(row, now)
        # After a preemption others have waited long enough.
        self._offers.note_idle(now, waited=bool(output.preempted))
        told = [decision for one in output.images for decision in self.update_images(one, now)]
        return [*told, *self._note_failure(suspects, now)]

    def _rows_of(self, rids: Iterable[int]) -> list[RequestState]:
        """The rows at the executor with these numbers."""
        return [row for rid in rids if (row := self._running.get(rid)) is not None]

    def _queue_siblings(self, rid: int) -> None:
        for entry in self._siblings.pop(rid, ()):
            self._queues.push(entry)
            # Their pictures are encoded, as those of the first one were.
            self._images.look_again()

    def _place(self, row: RequestState, now: float) -> None:
        row.placed_at = now
        self._rows += 1
        self._lora.note_placed(row, now)
        if not row.ends:
            row.status = RequestStatus.RUNNING

    def _leave(self, row: RequestState, now: float) -> None:
        """Remove a row that ended well, or never began."""
        if row.has_slot:
            self._quarantine.ended(row)
        self._running.remove(row.rid, now)

    def _requeue(self, row: RequestState, generated: list[int], now: float) -> None:
        """Queue a row that was preempted, unless it is cancelled."""
        self._running.remove(row.rid, now)
        if row.ends:
            return
        row.generated, row.preempted_at = list(generated), now
        row.queued = max(row.queued, min(now, row.behind))
        self._queue.push(row)
        self._requeued += 1

    def _rows_failed(self, failures: Iterable[Failed], now: float) -> list[RequestState]:
        """Remove the rows that failed; returns rows that may have failed the executor."""
        suspects = []
        for failure in failures:
            for row in self._rows_of(failure.rids):
                if failure.code == "executor_failed":
                    self._running.remove(row.rid, now)
                    suspects.append(row)
                else:
                    self._leave(row, now)
        return suspects

    def executor_retires(self) -> None:
        """Offer no rows until the next executor is ready; running rows go on."""
        self._present = False
        self._offers.executor_retires()

    def executor_ready(self, message: ExecutorReady, now: float) -> list[Decision]:
        """Take a new executor, and check the requests that came before its limits were known."""
        decisions = self.executor_lost("another executor has taken over", now)
        self._limits = limits = message.limits
        self._running.slots = limits.max_batch
        self._present = True
        self._dispatcher.executor_ready(message.incarnation)
        self._offers.executor_ready(now)
        self._images.executor_ready()
        for entry in list(self._queues):
            refusal = size_refusal(entry, self._settings.current, limits)
            if refusal is None:
                decisions += self._accept(entry)
                continue
            self._queues.remove(entry.rid)
            if entry.generated:
                # The executor before could hold more: the tokens that its client has are valid.
                siblings = self._siblings.pop(entry.rid, ())
                decisions.append(RowsCut([entry.rid, *(one.rid for one in siblings)]))
            else:
                self._refused += 1
                decisions.append(_failed([entry.rid], refusal))
        return decisions

    def executor_lost(self, reason: str, now: float, *, blameless: bool = False) -> list[Decision]:
        """Fail all rows with slots, and queue the offered ones again.

        All of them are suspects, as an offered row may have got a slot unheard, unless `blameless`.
        All outputs of the executor come before this.
        """
        self._present = False
        self._gone = []
        self._dispatcher.executor_lost()
        self._offers.executor_lost(now)
        decisions: list[Decision] = list(self._images.executor_lost(reason))
        lost = self._running.clear()
        running = [row.rid for row in lost if row.has_slot and not row.ends]
        if running:
            message = f"the executor was lost ({reason}): send the request again"
            decisions.append(Failed(running, "executor_failed", message))
        for row in lost:
            if not row.has_slot and not row.ends:
                self._queue.push(row)
        failed = [*lost, *self._images.take_lost()]
        return decisions if blameless else decisions + self._note_failure(failed, now)

    def update_images(self, message: encoder_scheduler.ImageEvent, now: float) -> list[Decision]:
        """Apply a message of encoder or executor about images."""
        told = self._images.hear(message)
        return [*told, *self._note_failure(self._images.take_lost(), now)]

    def tick(self, now: float) -> list[Decision]:
        """Act on the clock: expire requests, offer the next rows, preempt rows that ran long."""
        self._quarantine.forget(now)
        self._ticked = now
        decisions = [*self._expire(now), *self._images.act(self._is_open)]
        self._lora.tick(now)
        claim = self._claim(now)
        if claim is not None and claim.due <= now:
            self._running.claimant = claim.entry
            self._offers.fill(now)
            self._fair_share.preempt_for(claim)
        else:
            self._offers.fill(now)
        self._preemption.act(now, synchronous=self._settings.current.synchronous)
        schedule, gone = self._dispatcher.next(now), self._gone
        self._gone = []
        return [*decisions, *([] if schedule is None else [schedule]), *gone]

    def next_wake(self) -> float | None:
        """Time at which `tick` has something to do, if no event comes before."""
        times = [self._queues.next_deadline, self._offers.start_time(), self._dispatcher.due]
        times += [row.deadline for row in self._running if not row.ends]
        times += self._preemption.times(synchronous=self._settings.current.synchronous)
        if (turn := self._lora.due) < math.inf:
            times.append(turn)
        # One that is due already waits for an output of the executor.
        if (claim := self._claim(self._ticked)) is not None and claim.due > self._ticked:
            times.append(claim.due)
        if self._present and self._waiting()[0]:
            # The shares of clients change with time.
            times.append(self._ticked + _LOOK_S)
        return min((time for time in times if time is not None), default=None)

    def report(self, rid: int) -> SchedulerReport:
        """Numbers of waiting and running requests, and counters since the start."""
        queued, tokens = self._waiting()
        return SchedulerReport(
            rid=rid,
            running=self._running.running,
            places=self._running.slots,
            queued=queued,
            queued_tokens=tokens,
            rows=self._rows,
            requeued=self._requeued,
            refused=self._refused,
            embeddings=self._images.used,
        )

    def _waiting(self) -> tuple[int, int]:
        """Number of requests that wait, and of their prompt tokens."""
        behind = [*self._running.waiting, *self._coming()]
        tokens = self._queues.prompt_tokens + sum(row.prompt_tokens for row in behind)
        return len(self._queues) + len(behind), tokens

    def _coming(self) -> Iterator[RequestState]:
        """The further replies that wait for their first one."""
        return chain.from_iterable(self._siblings.values())

    def _tokens_of(self, client: int) -> int:
        """The prompt tokens that a client has waiting."""
        behind = chain(self._running.waiting, self._coming())
        own = sum(one.prompt_tokens for one in behind if one.client == client)
        return self._queues.tokens_of(client) + own

    def _is_open(self, rid: int) -> bool:
        known = rid in self._queues or self._running.get(rid) is not None
        return known or rid in [one.rid for one in self._coming()]

    def _accept(self, entry: RequestState) -> list[Decision]:
        if entry.accepted:
            return []
        entry.accepted = True
        return [Accepted(entry.rid, entry.prompt_tokens, entry.request.encoded)]

    def _note_failure(self, entries: Sequence[RequestState], now: float) -> list[Decision]:
        """Record suspects of a failure, and refuse requests that fail each time."""
        if entries:
            self._quarantine.failed(entries, now)
            # Requests equal to those that failed run alone, or not at all.
            withdraw(row for row in self._running.offered if self._quarantine.runs_alone(row))
        guilty = [entry.rid for entry in self._queues if self._quarantine.is_guilty(entry)]
        for rid in guilty:
            self._queues.remove(rid)
        self._refused += len(guilty)
        return [_failed(guilty, GUILTY)] if guilty else []

    def _claim(self, now: float) -> FairShareClaim | None:
        if self._running.closed or not self._present:
            return None
        claim = self._fair_share.next(now, synchronous=self._settings.current.synchronous)
        return None if claim is None or self._quarantine.runs_alone(claim.entry) else claim

    def _expire(self, now: float) -> list[Decision]:
        running = [row.rid for row in self._running if not row.ends and row.is_due(now)]
        for rid in running:
            self.cancel(rid)
        expired = running + [entry.rid for entry in self._queues.take_expired(now)]
        return [_failed(expired, EXPIRED)] if expired else []


def _failed(rids: list[int], refusal: Refusal) -> Failed:
    return Failed(rids, refusal.code, refusal.message, refusal.field, refusal.ahead)
