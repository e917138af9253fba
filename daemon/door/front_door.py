"""The front door's I/O loop: clients on one side, actors on the other."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence

import anyio
import anyio.lowlevel
import structlog
from anyio.abc import TaskStatus

from hearth.actors.arena import Arena
from hearth.actors.mailbox import Receiver, Sender
from hearth.actors.messages import (
    Deltas,
    DoorMessage,
    SchedulerControl,
    SchedulerMessage,
    SchedulerReport,
    TokenizerMessage,
)
from hearth.actors.settings import PolicySettings
from hearth.actors.supervisor_messages import ExecutorMetrics
from hearth.daemon.door.finished import Listener
from hearth.daemon.door.keys import Keys
from hearth.daemon.door.listener import open_listener
from hearth.daemon.door.overview import generations
from hearth.daemon.door.pictures import Pictures
from hearth.daemon.door.replies import ActorMessageHandler
from hearth.daemon.door.request_tracker import RequestTracker
from hearth.daemon.door.requests import ClientMessageHandler
from hearth.daemon.door.sessions import Session, Sessions
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import Received
from hearth.daemon.door.sockets import open_sockets
from hearth.daemon.door.state import DoorFacts, DoorState
from hearth.daemon.service_state import ServiceState
from hearth.runtime.errors import Code, HearthError
from hearth_client.protocol import Error


class Waker:
    """Wakes one task, which reads all watched descriptors before it waits, when one is readable.

    A descriptor that has not been drained wakes it again.
    """

    def __init__(self) -> None:
        self._woken = anyio.Event()

    def watch(self, *descriptors: int) -> None:
        """Wake while one of these descriptors is readable."""
        for descriptor in descriptors:
            asyncio.get_running_loop().add_reader(descriptor, self.wake)

    def unwatch(self, *descriptors: int) -> None:
        """Stop watching these descriptors, which are about to be closed."""
        for descriptor in descriptors:
            asyncio.get_running_loop().remove_reader(descriptor)

    def wake(self) -> None:
        """End the current wait, or the next one."""
        self._woken.set()

    async def wait(self, seconds: float) -> None:
        """Wait until woken, `seconds` at most."""
        timer = asyncio.get_running_loop().call_later(seconds, self.wake)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()
        self._woken = anyio.Event()


_log = structlog.get_logger("hearth.door")
_SLICE_S = 0.002
"""Time slice of one side, before the other side and the rest of the loop have theirs.

What a message takes beyond that its side owes to turns that come.
"""
_TICK_S = 0.1
"""Seconds between two checks for due work, while there is any."""
_LEASES_S = 0.4
"""Seconds between two checks with idle sessions alone: the clock of leases has to be read."""
_IDLE_S = 60.0
"""Seconds between two checks without sessions."""
_REPORT_S = 1.0
_REFUSED_S = 60.0
"""Seconds between two log lines about refused connections."""
_BEHIND_S = 0.01
"""Seconds between two sends to a client that does not read, as ZeroMQ does not always tell."""
_DRAIN_POLLS = 100
"""Number of times that a stop tries to send last answers, `_BEHIND_S` apart."""


class FrontDoor:
    """Serves clients on a local socket, with `keys` on TCP too; docs/front-door.md has its place.

    The sockets are opened by the constructor: `already_running` or `socket_unusable` is raised
    there. `environ` has socket activation and the agreed path. `listeners` are called with every
    generation that has ended, `on_step` with every step that gave tokens. The bytes of clients'
    pictures go into the arena `pictures`, where the model sees. `ended` is set when `run` is over.
    """

    def __init__(
        self,
        settings: DoorSettings,
        queue: PolicySettings,
        *,
        inbox: Receiver[DoorMessage],
        to_tokenizer: Sender[TokenizerMessage],
        to_scheduler: Sender[SchedulerMessage],
        to_scheduler_control: Sender[SchedulerControl],
        facts: DoorFacts,
        environ: Mapping[str, str] | None = None,
        listeners: Sequence[Listener] = (),
        on_step: Callable[[Deltas], None] = lambda _step: None,
        keys: Keys | None = None,
        pictures: Arena | None = None,
    ) -> None:
        self._sees = pictures is not None
        self._inbox = inbox
        self._state = DoorState(
            facts,
            self._as_seen(settings),
            queue,
            None if pictures is None else Pictures(pictures),
        )
        listener = open_listener(settings.socket, os.environ if environ is None else environ)
        self.path = listener.path
        self._socket = open_sockets(listener, self._state.settings, keys)
        self._tracker = RequestTracker(
            self._state,
            self._socket,
            to_tokenizer=to_tokenizer,
            to_scheduler=to_scheduler,
            to_scheduler_control=to_scheduler_control,
            listeners=listeners,
        )
        self._requests = ClientMessageHandler(self._state, self._tracker)
        self._replies = ActorMessageHandler(self._state, self._tracker, on_step)
        self._waker = Waker()
        self._left_s = 0.0
        self._refused = 0
        self._tell_refused = 0.0
        self._closed = False
        self._drained = anyio.Event()
        self._stopping = False
        self.ended = anyio.Event()

    def adopt(self, settings: DoorSettings, queue: PolicySettings) -> None:
        """Serve by other limits from now on; the socket, and what is open, stay as they are."""
        self._state.settings.current = self._as_seen(settings)
        self._state.queue.current = queue

    def allow(self, clients: Mapping[str, str]) -> None:
        """Let those in on TCP from now on, names by public keys; sessions of others end."""
        for session in self._tracker.sessions.all():
            if session.key and session.key not in clients:
                _log.info("a client is not allowed any more", client=session.client)
                self._end(session, "not_allowed", "the key of this client is not listed any more")
        # Behind these last answers.
        if self._socket.tcp is not None:
            self._socket.tcp.allow(clients)

    def tell(
        self,
        service_state: ServiceState | None = None,
        facts: DoorFacts | None = None,
        metrics: ExecutorMetrics | None = None,
    ) -> None:
        """Update the daemon's state, the facts of the service or the executor's metrics."""
        if service_state is not None:
            self._state.service_state = service_state
            if service_state.serves:
                self._tracker.executor_is(ready=service_state.state == "ready")
            if service_state.state in ("starting", "loading"):
                # The executor that they describe is gone.
                self._state.metrics = None
        if facts is not None:
            self._state.facts = facts
        if metrics is not None:
            self._state.metrics = metrics

    @property
    def tcp_port(self) -> int:
        """The port on which clients with keys are served, 0 for none."""
        return 0 if self._socket.tcp is None else self._socket.tcp.port

    @property
    def epoch(self) -> str:
        """Identifier of this run of the daemon."""
        return self._state.epoch

    @property
    def state(self) -> DoorState:
        """State, facts and counts, to be read."""
        return self._state

    @property
    def clients(self) -> int:
        """Sessions."""
        return len(self._tracker.sessions)

    @property
    def sessions(self) -> Sessions:
        """Sessions and open requests, to be read."""
        return self._tracker.sessions

    def cancel(self, name: str) -> None:
        """End a generation for the daemon's owner, by its id; raises `unknown_request`."""
        asked = (
            one for one in generations(self.sessions) if self._state.request_id(one.rid) == name
        )
        request = next(asked, None)
        if request is None:
            text = f"no request {name[:40]!r} is open: it has ended, or was another daemon's"
            raise HearthError("unknown_request", text, "request")
        _log.info("the operator ends a request", request=name)
        text = "the daemon's operator has ended this request"
        self._tracker.stop(request, "cancelled_by_operator", text)

    def end_all(self, code: str, message: str) -> None:
        """End every generation: none of them has a chance to be served soon."""
        for request in list(generations(self.sessions)):
            self._tracker.stop(request, code, message)

    async def load(self) -> SchedulerReport | None:
        """Ask the scheduler for its load; None where it does not answer in time."""
        reported = self._state.reported
        if self._tracker.ask_load():
            with anyio.move_on_after(_REPORT_S):
                await reported.wait()
                return self._state.load
        return None

    @property
    def open_requests(self) -> int:
        """Requests without a terminal answer."""
        return len(self._tracker.sessions.open_requests)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop` or cancellation; every open request then gets `shutting_down`."""
        try:
            self._waker.watch(self._inbox.descriptor, *self._socket.descriptors)
            task_status.started()
            await self._serve()
            await self._drain_outboxes()
        finally:
            self._waker.unwatch(self._inbox.descriptor, *self._socket.descriptors)
            self.close()
            self.ended.set()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new work, let open requests end for `drain_s` seconds, then end `run`."""
        if self._state.service_state.serves:
            self._state.service_state = self._state.service_state.draining("stopped")
        self._tracker.retry_after.stops(time.monotonic() + drain_s)
        if self.open_requests:
            with anyio.move_on_after(drain_s):
                await self._drained.wait()
        self._stopping = True
        self._waker.wake()

    def close(self) -> None:
        """End what is open with `shutting_down`, close the socket and remove its file."""
        if self._closed:
            return
        self._closed = True
        self._end_open()
        self._flush()
        self._socket.close()

    def _as_seen(self, settings: DoorSettings) -> DoorSettings:
        return settings if self._sees else settings.of_text()

    async def _drain_outboxes(self) -> None:
        """End what is open, and send last answers to clients that are behind."""
        self._end_open()
        for _ in range(_DRAIN_POLLS):
            if not self._flush():
                return
            await anyio.sleep(_BEHIND_S)

    def _end_open(self) -> None:
        for request in self._tracker.sessions.open_requests:
            self._tracker.stop(request, "shutting_down", "the daemon stops: try again later")

    def _flush(self) -> bool:
        """Send waiting answers; True if some still wait."""
        for session in self._tracker.delivery.behind:
            self._tracker.delivery.flush(session)
        self._tracker.abandon_lost()
        return bool(self._tracker.delivery.behind)

    async def _serve(self) -> None:
        """Run the loop: due work, then a time slice for each side, then a wait."""
        due = 0.0
        while not self._stopping:
            now = time.monotonic()
            if now >= due:
                self._tick(now)
                due = now + _TICK_S
            behind = self._flush()
            # Clients come last: a send takes the wake-up of what has arrived meanwhile.
            busy = self._take_answers() | self._fill_one()
            if self._take_requests() or busy or self._requests.filling:
                await anyio.lowlevel.checkpoint()
            else:
                soon = due - time.monotonic()
                await self._waker.wait(_BEHIND_S if behind else max(soon, self._idle_s))

    @property
    def _idle_s(self) -> float:
        """Seconds for which nothing is due; 0 where work may be due at any time."""
        sessions = self._tracker.sessions
        if sessions.busy or self._tracker.unsent or not self._state.service_state.serves:
            return 0.0
        if not self._socket.idle:
            return 0.0
        return _LEASES_S if len(sessions) else _IDLE_S

    def _take_answers(self) -> bool:
        """Pass on actors' messages for a slice of time; True if there may be more."""
        until = time.thread_time() + _SLICE_S
        while time.thread_time() < until:
            message = self._inbox.receive_nowait()
            if message is None:
                return False
            self._answer(message)
        return True

    def _take_requests(self) -> bool:
        """Handle clients' messages for a slice of time; True if there may be more."""
        self._left_s = min(self._left_s, 0.0) + _SLICE_S
        now = time.thread_time()
        while self._left_s > 0:
            received = self._socket.receive()
            if received is None:
                # Behind what they have said before.
                self._tracker.abandon_closed()
                return self._socket.pending
            began = time.thread_time()
            self._request(received)
            ended = time.thread_time()
            self._socket.charge(received, ended - began)
            self._left_s -= ended - now
            now = ended
        return True

    def _fill_one(self) -> bool:
        try:
            filled = self._requests.fill_one()
        except Exception:  # noqa: BLE001 - a fault in one message must not end the service
            self._state.totals["internal_errors"] += 1
            _log.exception("a client's pictures could not be taken")
            filled = True
        self._tracker.abandon_lost()
        return filled

    def _answer(self, message: DoorMessage) -> None:
        try:
            self._replies.handle(message)
        except Exception:  # noqa: BLE001 - a fault in one message must not end the service
            self._state.totals["internal_errors"] += 1
            _log.exception("an actor's message could not be handled", kind=type(message).__name__)
        self._tracker.abandon_lost()

    def _request(self, received: Received) -> None:
        try:
            self._requests.handle(received)
        except Exception:  # noqa: BLE001 - a fault in one message must not end the service
            self._state.totals["internal_errors"] += 1
            _log.exception("a client's message could not be handled")
            self._requests.answer_fault(received)
        self._tracker.abandon_lost()

    def _tick(self, now: float) -> None:
        if not self._state.service_state.serves and not self.open_requests:
            self._drained.set()
        self._tracker.retry_cancels()
        running = self._state.clock.now()
        self._socket.tick(running)
        self._tracker.abandon_closed()
        self._state.totals["connections_closed"] = self._socket.overweight
        for session in self._tracker.sessions.expired(running):
            self._expire(session)
        for request in self._tracker.sessions.overdue(now):
            self._tracker.stop(request, "deadline_exceeded", "the time for this request ran out")
        for session in self._tracker.delivery.behind:
            self._tracker.stop_if_slow(session)
        self._count_tcp(now)
        self._tracker.abandon_lost()

    def _expire(self, session: Session) -> None:
        text = f"nothing was heard of this client for {session.lease_s:g} s"
        self._end(session, "lease_expired", text)

    def _end(self, session: Session, code: Code, text: str) -> None:
        for request in list(session.open.values()):
            self._tracker.stop(request, code, text)
        self._tracker.delivery.send(session, Error(code=code, message=text))
        self._tracker.abandon(session, code)

    def _count_tcp(self, now: float) -> None:
        if self._socket.tcp is not None:
            connections, handshakes, refused = self._socket.tcp.take_counts()
            self._state.totals["tcp_connections"] += connections
            self._state.totals["tcp_handshakes"] += handshakes
            self._state.refusals["not_allowed"] += refused
            self._refused += refused
            if self._refused and now >= self._tell_refused:
                _log.warning(
                    "refused by TCP: keys that are not listed, or routing ids of clients' own",
                    times=self._refused,
                )
                self._refused, self._tell_refused = 0, now + _REFUSED_S
