"""Request tracker: work to the actors, and exactly one terminal answer for every request."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog
from msgspec import structs

from hearth.actors.mailbox import Sender
from hearth.actors.messages import (
    AskReport,
    Cancel,
    ClientGone,
    SchedulerControl,
    SchedulerMessage,
    TokenizerMessage,
)
from hearth.actors.settings import Reloadable
from hearth.daemon.door.finished import (
    FinishedRequest,
    Listener,
    finished,
    images_of,
    log_finished,
    milliseconds,
)
from hearth.daemon.door.retry_after import LEAST_S, RetryAfter
from hearth.daemon.door.sessions import OpenRequest, Session, Sessions
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.sockets import DoorSockets
from hearth.daemon.door.state import DoorState
from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.page_index import PINS_FULL
from hearth.runtime.speculation.policy import accept_length
from hearth_client.protocol import Answer, Delta, Done, Ended, Error, Speculation, Usage
from hearth_client.running_clock import RunningClock

_OUTBOX_ANSWERS = 1024
"""Answers that may wait for one client; more, and its session ends."""
_OUTBOX_BYTES = 16 << 20
"""Bytes of answers that may wait for one client; ending its requests should have kept to it."""


class Delivery:
    """Sends answers in order; notes sessions whose clients are gone or do not read at all."""

    def __init__(
        self, socket: DoorSockets, settings: Reloadable[DoorSettings], clock: RunningClock
    ) -> None:
        self._socket = socket
        self._settings = settings
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self._behind: dict[int, Session] = {}
        self._lost: dict[int, tuple[Session, str]] = {}

    @property
    def behind(self) -> list[Session]:
        """Sessions with answers that wait."""
        return list(self._behind.values())

    def take_lost(self) -> list[tuple[Session, str]]:
        """Sessions that answers no longer reach, and why; each is returned once."""
        lost, self._lost = list(self._lost.values()), {}
        return lost

    def reject(self, connection: int, error: Error, *, delimited: bool) -> None:
        """Answer a connection without a session, if it can be reached."""
        self._socket.send(connection, self._encoder.encode(error), delimited=delimited)

    def send(self, session: Session, answer: Answer, request: OpenRequest | None = None) -> None:
        """Send an answer, behind those that wait; a delta with its request."""
        if session.connection in self._lost:
            return
        waiting = session.outbox
        if not waiting and self._try(session, answer) != "full":
            return
        if len(waiting) >= _OUTBOX_ANSWERS or waiting.bytes > _OUTBOX_BYTES:
            self._lost[session.connection] = session, "slow_client"
            return
        waiting.add(answer, self._clock.now(), request)
        self._behind[session.connection] = session

    def send_delta(self, request: OpenRequest, delta: Delta) -> None:
        """Send new text, numbered here, or let the delta of that request that waits grow."""
        if request.session.outbox.merge(request, delta):
            return
        delta.seq = request.next_seq
        request.next_seq += 1
        self.send(request.session, delta, request)

    @property
    def heaviest(self) -> Session | None:
        """The client for which the most waits, where too much waits for all together."""
        if (
            sum(one.outbox.bytes for one in self._behind.values())
            <= self._settings.current.unread_bytes
        ):
            return None
        return max(self._behind.values(), key=lambda one: one.outbox.bytes)

    def too_slow(self, session: Session) -> bool:
        """True if a client's unread answers exceed the limits in bytes or in time."""
        outbox = session.outbox
        if not outbox:
            return False
        blocked_s = self._clock.now() - outbox.blocked_since
        settings = self._settings.current
        return outbox.bytes > settings.slow_bytes or blocked_s > settings.slow_s

    def give_time(self, session: Session) -> None:
        """Count anew how long a client has not read."""
        session.outbox.blocked_since = self._clock.now()

    def flush(self, session: Session) -> None:
        """Send what waits, as far as the client takes it."""
        while (answer := session.outbox.head()) is not None:
            if self._try(session, answer) != "sent":
                return
            session.outbox.sent(self._clock.now())
        self._behind.pop(session.connection, None)

    def forget(self, session: Session) -> None:
        """Drop what waits for a session that has ended."""
        self._behind.pop(session.connection, None)

    def _try(self, session: Session, answer: Answer) -> str:
        # A long answer would be encoded in each turn, as long as its client does not read.
        if self._socket.full(session.connection):
            return "full"
        outcome = self._socket.send(
            session.connection, self._encoder.encode(answer), delimited=session.delimited
        )
        if outcome == "gone":
            self._lost[session.connection] = session, "gone"
        return outcome


_log = structlog.get_logger("hearth.door")
OWN_REPORT = 0
"""Number in place of a request's; no request has it."""


class RequestTracker:
    """Posts to the actors' mailboxes and ends requests; owns sessions and delivery.

    `listeners` are called with each generation that has ended; their exceptions are logged.
    """

    def __init__(
        self,
        state: DoorState,
        socket: DoorSockets,
        *,
        to_tokenizer: Sender[TokenizerMessage],
        to_scheduler: Sender[SchedulerMessage],
        to_scheduler_control: Sender[SchedulerControl],
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.sessions = Sessions(
            state.settings,
            release=state.pictures.free if state.pictures is not None else None,
        )
        self._socket = socket
        self.delivery = Delivery(socket, state.settings, state.clock)
        self.retry_after = RetryAfter(state.queue, time.monotonic())
        self._state = state
        self._listeners = (log_finished, *listeners)
        self._to_tokenizer = to_tokenizer
        self._to_scheduler = to_scheduler
        self._to_scheduler_control = to_scheduler_control
        self._unsent: deque[tuple[Sender[Any], Cancel | ClientGone]] = deque()
        self._most_unsent = 0

    def ask_tokenizer(self, request: OpenRequest, message: TokenizerMessage) -> None:
        """Post to the tokenizer; a full mailbox ends the request with `queue_full`."""
        self._post(request, self._to_tokenizer, message)

    def ask_scheduler(self, request: OpenRequest, message: SchedulerMessage) -> None:
        """Post to the scheduler; a full mailbox ends the request with `queue_full`."""
        self._post(request, self._to_scheduler, message)

    def ask_load(self) -> bool:
        """Ask the scheduler for a report to the daemon itself; False where its mailbox is full."""
        try:
            self._to_scheduler.post(AskReport(OWN_REPORT))
        except HearthError:
            return False
        return True

    def reply(self, request: OpenRequest, answer: Answer) -> None:
        """End a request with the reply that it asked for."""
        if self.sessions.close(request):
            self.delivery.send(request.session, answer)
            self._record(request, "done", "completed")

    def done(self, request: OpenRequest, reason: str) -> None:
        """End a generation as asked."""
        if self.sessions.close(request):
            done = Done(
                id=request.id,
                reason=reason,
                usage=usage_of(request),
                speculation=speculation_of(request),
                images=images_of(request),
            )
            told = "end_details" in request.session.features
            if told and request.rid in request.ended:
                done.stop = request.ended[request.rid].stop
            if len(request.replies) > 1:
                done.choices = _ends_of(request, reason, details=told)
            self.delivery.send(request.session, done)
            self._record(request, reason, "cancelled" if reason == "cancelled" else "completed")

    def cancel(self, request: OpenRequest) -> None:
        """End a generation at once as `cancelled`, then notify the actors."""
        self.done(request, "cancelled")
        self.drop_work(request)

    def fail(
        self,
        request: OpenRequest,
        code: str,
        message: str,
        field: str | None = None,
        ahead: int = 0,
    ) -> None:
        """End a request with an error; `ahead` others have to end before it could be admitted."""
        if self.sessions.close(request):
            error = Error(id=request.id, code=code, message=message, field=field or "")
            error.retry_after_s = self.retry_after_s(code, request.session, ahead)
            if request.accepted and "end_details" in request.session.features:
                error.usage = usage_of(request)
            if (code, field) == PINS_FULL and self.make_room(request.session.peer, pins=True):
                error.retry_after_s = LEAST_S
            self.delivery.send(request.session, error)
            if not request.accepted:
                self._state.refusals[code] += 1
            self._record(request, code, "failed")

    def executor_is(self, *, ready: bool) -> None:
        """An executor is ready, or there is none."""
        working = bool(self.sessions.generations)
        self.retry_after.executor(time.monotonic(), ready=ready, working=working)

    def retry_after_s(self, code: str, session: Session | None, ahead: int = 0) -> float | None:
        """Seconds until a request refused with `code` may be retried; None where that is vain."""
        return self.retry_after.after(
            code,
            session.number if session else 0,
            time.monotonic(),
            ahead=ahead,
            own=session.generations if session else 0,
            open_now=self.sessions.generations,
        )

    def stop(self, request: OpenRequest, code: str, message: str) -> None:
        """End a request with an error of the front door's own, then notify the actors."""
        self.fail(request, code, message)
        self.drop_work(request)

    def stop_if_slow(self, session: Session) -> None:
        """End what a client asked for that does not read; its session where that is not enough.

        Where too much waits for all clients together, it is the one for which the most waits.
        """
        if (heaviest := self.delivery.heaviest) is not None:
            session = heaviest
        elif not self.delivery.too_slow(session):
            return
        asked = list(session.open.values())
        for request in asked:
            session.outbox.withdraw(request)
            self.stop(request, "slow_client", "the client does not read its answers")
        if asked:
            self.delivery.give_time(session)
        if not asked or self.delivery.too_slow(session):
            self.abandon(session, "slow_client")

    def abandon(self, session: Session, reason: str) -> None:
        """End a session whose client cannot be reached any more; a second call does nothing."""
        if self.sessions.get(session.connection) is not session:
            return
        self._socket.session_ended(session.connection)
        self.delivery.forget(session)
        self.retry_after.client_left(session.number, time.monotonic())
        for request in self.sessions.drop(session):
            self._record(request, reason, "failed")
            self.drop_work(request)
        if session.pins:
            # Behind the cancels of its requests.
            self._post_for_sure(self._to_tokenizer, ClientGone(session.number))

    def abandon_lost(self) -> None:
        """End the sessions that answers no longer reach."""
        for session, reason in self.delivery.take_lost():
            self.abandon(session, reason)

    def began(self, session: Session) -> None:
        """Keep the connection of a new session."""
        self._socket.session_began(session.connection)

    def abandon_closed(self) -> None:
        """End the sessions whose connections have ended."""
        self._abandon_at(self._socket.take_closed())

    def make_room(self, peer: str, *, pins: bool = False) -> bool:
        """End an idle session so that `peer` can connect, or pin; True if one was ended.

        Its client learns of it with its next message.
        """
        session = self.sessions.giving_way(peer, pins=pins)
        if session is None:
            return False
        what = "its pins" if pins else "its place"
        _log.info("an idle client gives way to another user", client=session.client, gives=what)
        self.abandon(session, "gave_way")
        return True

    def probe_idle_sessions(self) -> None:
        """End sessions whose clients have hung up, even where messages of theirs are unread."""
        self._abandon_at(self._socket.hung_up())
        self.abandon_closed()

    def _abandon_at(self, connections: Sequence[int]) -> None:
        for connection in connections:
            session = self.sessions.get(connection)
            if session is not None:
                self.abandon(session, "gone")

    @property
    def unsent(self) -> bool:
        """True if messages wait for `retry_cancels`."""
        return bool(self._unsent)

    def retry_cancels(self) -> None:
        """Post again cancels, and notices of clients that left, that found a full mailbox."""
        for _ in range(len(self._unsent)):
            self._post_for_sure(*self._unsent.popleft())

    def _post(self, request: OpenRequest, mailbox: Sender[Any], message: Any) -> None:
        self._bound_unsent()
        try:
            mailbox.post(message)
        except HearthError as error:
            self.fail(request, error.code, "the daemon has too much to do now: try again later")

    def drop_work(self, request: OpenRequest) -> None:
        """Notify the actors that nobody waits for any reply of a request."""
        # The tokenizer's comes in order behind its request, the scheduler's comes early.
        for rid in request.replies:
            if request.kind != "status":
                self._post_for_sure(self._to_tokenizer, Cancel(rid))
            if request.kind == "generate":
                self._post_for_sure(self._to_scheduler_control, Cancel(rid))

    def _post_for_sure(self, mailbox: Sender[Any], message: Cancel | ClientGone) -> None:
        try:
            mailbox.post(message)
        except HearthError:
            self._bound_unsent()
            self._unsent.append((mailbox, message))
            if len(self._unsent) > self._most_unsent:
                self._unsent.popleft()

    def _bound_unsent(self) -> None:
        # What is open by larger limits of before may have to be cancelled later.
        limits = self._state.settings.current
        bound = 2 * limits.clients * limits.requests_per_client
        self._most_unsent = max(self._most_unsent, bound)

    def _record(self, request: OpenRequest, reason: str, total: str) -> None:
        if request.kind != "generate":
            _log.debug(request.kind, rid=request.rid, reason=reason)
            return
        now = time.monotonic()
        if request.accepted:
            self.retry_after.ended(now)
        self.retry_after.works(now, working=bool(self.sessions.generations))
        self._state.totals[total] += 1
        if total == "failed":
            self._state.totals[reason] += 1
        self._state.tokens += request.completion_tokens
        if request.pins and total != "failed":
            request.session.pinned += request.prompt_tokens
        request.session.tokens += request.completion_tokens
        name = self._state.request_id(request.rid)
        ended = finished(request, name, reason, failed=total == "failed")
        if ended.images is not None:
            self._state.totals["images"] += ended.images.count
            self._state.totals["images_cached"] += ended.images.cached
            self._state.totals["image_tokens"] += ended.images.tokens
        for listener in self._listeners:
            self._tell(listener, ended)

    def _tell(self, listener: Listener, ended: FinishedRequest) -> None:
        try:
            listener(ended)
        except Exception:  # noqa: BLE001 - who counts must not end the service
            self._state.totals["internal_errors"] += 1
            _log.exception("the end of a request could not be noted", request=ended.request)


def _ends_of(request: OpenRequest, reason: str, *, details: bool) -> list[Ended]:
    """The end of each reply, in their order; those that had none end by `reason`."""
    ends = []
    for rid in request.replies:
        open_end = Ended(reason=reason, completion_tokens=request.reply_tokens[rid])
        end = request.ended.get(rid, open_end)
        ends.append(end if details else structs.replace(end, stop=""))
    return ends


def usage_of(request: OpenRequest) -> Usage:
    """Counts and times of a generation so far."""
    return Usage(
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.completion_tokens,
        reasoning_tokens=request.reasoning_tokens,
        cached_tokens=request.cached_tokens,
        queue_ms=milliseconds(request.queued_s),
        prefill_ms=milliseconds(request.prefill_s),
        decode_ms=milliseconds(request.last_token - request.first_token),
    )


def speculation_of(request: OpenRequest) -> Speculation | None:
    """The rounds of a generation so far; None where it took part in none."""
    if not request.rounds:
        return None
    return Speculation(
        rounds=request.rounds,
        drafted=request.drafted,
        accepted=request.accepted_tokens,
        accept_length=round(accept_length(request.rounds, request.accepted_tokens), 3),
    )
