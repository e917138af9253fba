"""Messages of actors, turned into answers to clients."""

import time
from collections.abc import Callable

import anyio
import msgspec

from hearth.actors.messages import (
    Accepted,
    Converted,
    Deltas,
    DoorMessage,
    Embedded,
    Failed,
    RowDelta,
    SchedulerReport,
)
from hearth.actors.supervisor_messages import ExecutorMetrics
from hearth.daemon.door import sessions
from hearth.daemon.door import state as door_state
from hearth.daemon.door.request_tracker import OWN_REPORT, RequestTracker
from hearth.runtime.errors import CODES
from hearth.runtime.request import RowRound
from hearth_client import protocol
from hearth_client.protocol import ExecutorReport


def executor_report(metrics: ExecutorMetrics) -> ExecutorReport:
    """The report of an executor, each figure by its name.

    Speculation and images are reported where there were any.
    """
    report = msgspec.convert(metrics, ExecutorReport, from_attributes=True)
    if not metrics.speculation.rounds:
        report.speculation = None
    if not (metrics.images.images or metrics.images.encoded):
        report.images = None
    return report


_MAX_TEXT_BYTES = 7 << 20
"""Most bytes of a detokenized text: no answer to a client has more than 8 MiB."""


class ActorMessageHandler:
    """Handles one actor message at a time; requests that have ended get nothing more.

    `on_step` is called with each step after the clients got theirs.
    """

    def __init__(
        self,
        state: door_state.DoorState,
        tracker: RequestTracker,
        on_step: Callable[[Deltas], None],
    ) -> None:
        self._state = state
        self._on_step = on_step
        self._tracker = tracker
        self._find = tracker.sessions.find

    def handle(self, message: DoorMessage) -> None:
        """Answer the clients that `message` concerns."""
        if isinstance(message, Deltas):
            self._note_placed(message)
            self._count_rounds(message.rounds)
            for row in message.rows:
                self._row_arrived(row, message)
            self._on_step(message)
        elif isinstance(message, Failed):
            for rid in message.rids:
                if (failed := self._find(rid)) is not None:
                    self._fail(failed, message)
        else:
            request = self._find(message.rid)
            if request is not None:
                self._answer(request, message)
            elif isinstance(message, SchedulerReport) and message.rid == OWN_REPORT:
                self._state.load = message
                self._state.reported.set()
                self._state.reported = anyio.Event()

    def _answer(
        self,
        request: sessions.OpenRequest,
        message: Accepted | Embedded | Converted | SchedulerReport,
    ) -> None:
        if isinstance(message, Accepted):
            self._accepted(request, message)
        elif isinstance(message, Embedded):
            if request.embedded is not None:
                return
            request.embedded = message
            request.images_s = time.monotonic() - request.opened - request.tokenize_s
            self._replay(request)
        elif isinstance(message, Converted):
            self._converted(request, message)
        else:
            self._tracker.reply(request, self._report(request.id, message))

    def _fail(self, request: sessions.OpenRequest, failed: Failed) -> None:
        # Codes are counted, and clients know the documented ones alone.
        code = failed.code if failed.code in CODES else "internal"
        field = _field_of(request, failed.field)
        self._tracker.fail(request, code, failed.message, field, failed.ahead)
        if len(request.replies) > 1:
            # The others go on otherwise.
            self._tracker.drop_work(request)

    def _accepted(self, request: sessions.OpenRequest, message: Accepted) -> None:
        if request.accepted:
            return
        request.accepted = True
        request.prompt_tokens = message.prompt_tokens
        request.tokenize_s = max(0.0, message.encoded - request.opened)
        answer = protocol.Accepted(
            id=request.id,
            prompt_tokens=message.prompt_tokens,
            request=self._state.request_id(request.rid),
        )
        self._tracker.delivery.send(request.session, answer)
        self._replay(request)

    def _replay(self, request: sessions.OpenRequest) -> None:
        early, request.early = request.early, []
        for row, step in early:
            self._row_arrived(row, step)

    def _converted(self, request: sessions.OpenRequest, message: Converted) -> None:
        text = message.text or ""
        if message.tokens is not None:
            self._tracker.reply(request, protocol.Tokens(id=request.id, tokens=message.tokens))
        elif len(text.encode()) > _MAX_TEXT_BYTES:
            reason = f"the text has more than {_MAX_TEXT_BYTES} bytes: ask for less at once"
            self._tracker.fail(request, "message_too_large", reason, "tokens")
        else:
            self._tracker.reply(request, protocol.Detokenized(id=request.id, text=text))

    def _note_placed(self, step: Deltas) -> None:
        for rid, since in step.slot_times.items():
            request = self._find(rid)
            # A reply that was put back has had its first token before.
            if request is not None and not request.prefill_s:
                request.queued_s, request.prefill_s = since - request.opened, step.ended - since
                request.cached_tokens = step.cached.get(rid, 0)

    def _count_rounds(self, rounds: list[RowRound]) -> None:
        for one in rounds:
            request = self._find(one.row)
            if request is not None:
                request.rounds += 1
                request.drafted += one.drafted
                request.accepted_tokens += one.accepted

    def _row_arrived(self, row: RowDelta, step: Deltas) -> None:
        request = self._find(row.rid)
        if request is None or row.rid in request.ended:
            return
        if not request.accepted or (request.images and request.embedded is None):
            # Two actors write to the door's inbox: tokens may overtake the scheduler's message.
            request.early.append((row, step))
            return
        if row.tokens or row.text or row.reasoning or row.calls:
            _count(request, row, step)
            self._delta(request, row, step.ended)
        if row.finish is not None:
            tokens = request.reply_tokens[row.rid]
            end = protocol.Ended(reason=row.finish, completion_tokens=tokens, stop=row.stop_string)
            request.ended[row.rid] = end
            if len(request.ended) == len(request.replies):
                first = request.ended[request.rid]
                self._tracker.done(request, first.reason)

    def _delta(self, request: sessions.OpenRequest, row: RowDelta, ended: float) -> None:
        delivery = self._tracker.delivery
        delta = protocol.Delta(
            id=request.id,
            seq=0,
            text=row.text,
            tokens=row.tokens,
            logprobs=_logprobs(row),
            ended=ended if request.timestamps else None,
            reasoning=row.reasoning,
            choice=request.replies.index(row.rid),
            tool_calls=[
                protocol.CallPiece(
                    index=one.index, id=one.id, name=one.name, arguments=one.arguments
                )
                for one in row.calls
                if one.id or one.arguments
            ],
        )
        delivery.send_delta(request, delta)
        self._tracker.stop_if_slow(request.session)

    def _report(self, request_id: str, load: SchedulerReport) -> protocol.StatusReport:
        facts, metrics, service_state = (
            self._state.facts,
            self._state.metrics,
            self._state.service_state,
        )
        # The client may learn of an end before the scheduler does.
        accepted = [one for one in self._tracker.sessions.open_requests if one.accepted]
        open_now = sum(len(one.replies) - len(one.ended) for one in accepted)
        counted = {"rows": load.rows, "requeued": load.requeued}
        return protocol.StatusReport(
            id=request_id,
            server=facts.server,
            model=facts.model,
            state=service_state.state,
            stage=service_state.stage,
            share=service_state.share,
            reason=service_state.reason,
            uptime_s=self._state.uptime_s,
            clients=len(self._tracker.sessions),
            running=max(0, min(load.running, open_now - load.queued)),
            places=load.places,
            queued=load.queued,
            queued_tokens=load.queued_tokens,
            totals={**self._state.totals, **counted, "refused_by_scheduler": load.refused},
            engine=facts.engine,
            adapters=facts.adapters,
            executor=None if metrics is None else executor_report(metrics),
        )


def _field_of(request: sessions.OpenRequest, field: str | None) -> str | None:
    """Client's name of the image that actors call `images[k]`."""
    known = {f"images[{number}]": name for number, name in enumerate(request.images)}
    return known.get(field or "", field)


def _count(request: sessions.OpenRequest, row: RowDelta, step: Deltas) -> None:
    if request.completion_tokens == 0:
        request.first_token, request.first_left = step.ended, time.monotonic()
    request.completion_tokens += len(row.tokens)
    request.reasoning_tokens += row.reasoning_tokens
    request.reply_tokens[row.rid] += len(row.tokens)
    request.last_token = step.ended
    request.detokenize_s += step.detokenize_s


def _logprobs(row: RowDelta) -> list[protocol.TokenLogprob]:
    spellings = row.spellings or [[]] * len(row.logprobs)
    return [
        protocol.TokenLogprob(
            logprob=token.logprob or 0.0,
            top=[(other.token_id, other.logprob) for other in token.top],
            token_bytes=b"".join(spelt[:1]),
            top_bytes=spelt[1:],
        )
        for token, spelt in zip(row.logprobs, spellings, strict=True)
    ]
