"""Messages of clients: checked, admitted or refused, and passed on as work."""

import time
from collections.abc import Sequence

from msgspec import structs

from hearth.actors.messages import AskReport, Convert, Request
from hearth.actors.scheduler.admission import within_share
from hearth.daemon.door.faults import fields_of, id_of
from hearth.daemon.door.pictures import check_frames, visuals_of
from hearth.daemon.door.request_tracker import RequestTracker
from hearth.daemon.door.sessions import OpenRequest, Session
from hearth.daemon.door.socket import Received
from hearth.daemon.door.state import DoorState
from hearth.daemon.door.wire import MessageError, convert, decode, prepare
from hearth.runtime.errors import HearthError
from hearth_client.protocol import (
    PROTOCOL,
    Bye,
    Cancel,
    ClientMessage,
    Detokenize,
    Error,
    Generate,
    Hello,
    Leased,
    Limits,
    Message,
    Status,
    Tokenize,
    Welcome,
)

FEATURES = (
    "adapters",
    "cache",
    "cache_salt",
    "detokenize",
    "end_details",
    "generation_defaults",
    "logprobs",
    "n",
    "priority",
    "speculation",
    "status",
    "status_only",
    "timestamps",
    "token_bytes",
    "tokenize",
    "traceparent",
)


class ClientMessageHandler:
    """Handles one message at a time; every one that can be answered is answered."""

    def __init__(self, state: DoorState, tracker: RequestTracker) -> None:
        self._state = state
        self._tracker = tracker
        self._sessions = tracker.sessions
        # Number of the request of the last picture that was copied.
        self._filled = 0

    def handle(self, received: Received) -> None:
        """Act on one message, or refuse it with `error`."""
        session = self._sessions.get(received.connection)
        try:
            message = self._decode(received)
            if session is not None:
                self._sessions.renew(session, self._state.clock.now())
            if isinstance(message, Hello):
                self._hello(received, message)
            elif session is None:
                raise _greeting_missing(message)
            else:
                self._act(session, message, received.pictures)
        except MessageError as error:
            self._refuse(received, error)

    def answer_fault(self, received: Received) -> None:
        """Answer a message on which `handle` failed for a fault of ours."""
        error = HearthError("internal", "the daemon failed on this message: please report it")
        request_id = id_of(fields_of(received.data))
        session = self._sessions.get(received.connection)
        request = session.open.get(request_id) if session is not None else None
        if request is None:
            self._refuse(received, MessageError(error, request_id))
        else:
            self._tracker.stop(request, error.code, error.message)

    def _decode(self, received: Received) -> ClientMessage:
        settings = self._state.settings.current
        if len(received.data) > settings.frame_bytes:
            text = f"the message has {len(received.data)} bytes, more than the limit of "
            error = HearthError("message_too_large", f"{text}{settings.frame_bytes}")
            # As large as a picture: to look for its id would take the time of all clients.
            huge = len(received.data) > 2 * settings.frame_bytes
            raise MessageError(error, "" if huge else id_of(fields_of(received.data)))
        message = decode(received.data)
        try:
            check_frames(message, received.frames, settings.images_per_request)
        except HearthError as error:
            raise MessageError(error, getattr(message, "id", "")) from None
        return message

    def _refuse(self, received: Received, reason: MessageError) -> None:
        self._state.totals["refused"] += 1
        self._state.refusals[reason.error.code] += 1
        error = Error(
            code=reason.error.code,
            message=reason.error.message,
            field=reason.error.field or "",
            id=reason.id,
        )
        session = self._sessions.get(received.connection)
        error.retry_after_s = self._tracker.retry_after_s(error.code, session)
        if session is None:
            self._tracker.delivery.reject(received.connection, error, delimited=received.delimited)
            return
        if error.id in session.open:
            # An error that bears the id would end the request that is open under it.
            error.id = ""
        self._tracker.delivery.send(session, error)

    def _hello(self, received: Received, message: Hello) -> None:
        known = self._sessions.get(received.connection)
        own = known.lease_s if known else self._state.settings.current.lease_s
        lease_s = message.lease_s or own
        if known is None and self._sessions.full:
            self._tracker.probe_idle_sessions()
        if known is None and self._sessions.full and not message.status_only:
            self._tracker.make_room(received.peer)
        try:
            session = self._sessions.greet(
                received.connection,
                # Who has shown a key goes by its name, whatever it says.
                received.name or message.client,
                lease_s,
                self._state.clock.now(),
                status_only=message.status_only,
                key=received.key,
                peer=received.peer,
            )
        except HearthError as error:
            raise MessageError(error, "") from None
        if known is None:
            self._tracker.began(session)
        session.delimited = received.delimited
        session.features = frozenset(message.features)
        self._tracker.delivery.send(session, self._welcome(lease_s))

    def _welcome(self, lease_s: float) -> Welcome:
        facts, settings = self._state.facts, self._state.settings.current
        queue = self._state.queue.current
        limits = Limits(
            frame_bytes=settings.frame_bytes,
            frames=1 + settings.images_per_request,
            requests_per_client=settings.requests_per_client,
            prompt_tokens=facts.prompt_tokens,
            total_tokens=facts.total_tokens,
            queued_requests=queue.queue_requests,
            queued_tokens=queue.queue_tokens,
            lease_s=lease_s,
        )
        features = [*FEATURES, *facts.features]
        if settings.images_per_request:
            features.append("images")
            limits.images, limits.image_bytes = settings.images_per_request, settings.image_bytes
            limits.request_image_bytes = settings.images_in_flight_bytes
            limits.image_tokens = settings.image_tokens or facts.prompt_tokens // 2
        return Welcome(
            proto=PROTOCOL,
            server=facts.server,
            limits=limits,
            features=sorted(features),
            model=facts.model,
            epoch=self._state.epoch,
            adapters=facts.adapters,
            tool_format=facts.tool_format,
        )

    def _act(
        self, session: Session, message: ClientMessage, pictures: Sequence[memoryview]
    ) -> None:
        if isinstance(message, Cancel):
            self._cancel(session, message)
        elif session.status_only and isinstance(message, (Generate, Tokenize, Detokenize)):
            text = "this session said status_only in hello: it may ask for status alone"
            raise MessageError(HearthError("unsupported_option", text, "t"), message.id)
        elif isinstance(message, (Generate, Tokenize, Detokenize, Status)):
            self._open(session, message, pictures)
        elif isinstance(message, Bye):
            self._tracker.abandon(session, "left")
        else:
            self._tracker.delivery.send(session, Leased(seconds=session.lease_s))

    def _cancel(self, session: Session, message: Cancel) -> None:
        request = session.open.get(message.id)
        if request is not None and request.kind == "generate":
            self._tracker.cancel(request)

    def _open(
        self,
        session: Session,
        message: Generate | Tokenize | Detokenize | Status,
        pictures: Sequence[memoryview],
    ) -> None:
        now = time.monotonic()
        try:
            if not self._state.service_state.serves and not isinstance(message, Status):
                raise HearthError(  # noqa: TRY301 - refused in one place with the other reasons
                    "shutting_down", "the daemon is about to stop: try again after its restart"
                )
            if isinstance(message, Generate):
                if self._state.service_state.refuses:
                    raise HearthError("weights_invalid", self._state.service_state.reason)  # noqa: TRY301
                self._generate(session, message, pictures, now)
            else:
                self._ask(session, message, pictures, now)
        except HearthError as error:
            raise MessageError(error, message.id) from None

    def _generate(
        self, session: Session, message: Generate, pictures: Sequence[memoryview], now: float
    ) -> None:
        deadline = None if message.deadline_s is None else now + message.deadline_s
        if message.adapter:
            self._check_adapter(message.adapter)
        self._check_queue(session, message.n, now)
        request = self._sessions.admit(
            session, message.id, "generate", now, deadline, replies=message.n
        )
        self._tracker.retry_after.works(now, working=True)
        request.timestamps, request.traceparent = message.timestamps, message.traceparent
        request.chat = message.messages is not None
        self._state.totals["requests"] += 1
        asked = prepare(message, request.replies, deadline, session, self._state.facts.sampling)
        request.options = asked.options
        request.pins = message.cache == "pin"
        session.pins |= request.pins
        self._pass_on(request, message.messages, pictures, asked)

    def _check_adapter(self, name: str) -> None:
        known = self._state.facts.adapters
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "there are none"
            text = f"there is no adapter {name!r} here: {there}"
            raise HearthError("adapter_unknown", text, "adapter")

    def _check_queue(self, session: Session, replies: int, now: float) -> None:
        """Raise for what the scheduler would refuse, with all replies, before anything is encoded.

        The door counts what is open: as many as there are places run, the others wait.
        """
        places, queue = self._state.facts.places, self._state.queue.current
        limit = queue.queue_requests
        waiting = max(0, self._sessions.generations - places)
        own = max(0, session.generations - places)
        # Behind an empty queue any number is admitted.
        free = limit - waiting - (replies - 1 if waiting else 0)
        if not self._tracker.retry_after.admits(session.number, free, now):
            raise HearthError(
                "queue_full",
                f"{waiting} requests wait already, the limit is {limit}: try again later",
                "queue_requests",
            )
        if not within_share(own, replies, waiting, limit, queue.client_queue_share):
            raise HearthError(
                "too_many_requests",
                f"{session.generations} requests of this client are open, its share of what may "
                "wait: wait for one to end",
                "client_queue_share",
            )

    def _pass_on(
        self,
        request: OpenRequest,
        messages: Sequence[Message] | None,
        frames: Sequence[memoryview],
        asked: Request | Convert,
    ) -> None:
        """Ask the tokenizer, once pictures are in the arena; a full arena ends the request."""
        if not frames or self._state.pictures is None:
            self._tracker.ask_tokenizer(request, asked)
            return
        shown, share = visuals_of(messages), self._state.queue.current.client_queue_share
        request.images = [field for field, _ in shown]
        own = sum(slot.size for one in request.session.open.values() for slot in one.slots)
        try:
            request.slots = self._state.pictures.reserve(frames, own, share)
        except HearthError as error:
            self._tracker.fail(request, error.code, error.message, error.field)
            return
        most = self._state.settings.current.image_bytes
        request.filling = self._state.pictures.fill(shown, frames, request.slots, most), asked

    @property
    def filling(self) -> bool:
        """True if pictures wait to be copied into the arena."""
        return self._next_filling() is not None

    def _next_filling(self) -> OpenRequest | None:
        """The request whose picture is next, by turns in the order of their numbers."""
        if self._state.pictures is None:
            return None
        waiting = [one for one in self._sessions.open_requests if one.filling is not None]
        return min(waiting, key=lambda one: (one.rid <= self._filled, one.rid), default=None)

    def fill_one(self) -> bool:
        """Copy one picture into the arena; False where none waits.

        Others have their turn in between: a request may have many, and each is a copy.
        """
        request = self._next_filling()
        if request is None or request.filling is None:
            return False
        self._filled = request.rid
        filling, asked = request.filling
        try:
            next(filling)
        except StopIteration as done:
            request.filling = None
            self._tracker.ask_tokenizer(request, structs.replace(asked, visuals=done.value))
        except HearthError as error:
            self._tracker.fail(request, error.code, error.message, error.field)
        except Exception:
            self._tracker.fail(request, "internal", "the daemon failed on this message")
            raise
        return True

    def _ask(
        self,
        session: Session,
        message: Tokenize | Detokenize | Status,
        pictures: Sequence[memoryview],
        now: float,
    ) -> None:
        deadline = now + self._state.settings.current.answer_s
        if isinstance(message, Status):
            request = self._sessions.admit(session, message.id, "status", now, deadline)
            self._tracker.ask_scheduler(request, AskReport(request.rid))
        else:
            request = self._sessions.admit(session, message.id, "convert", now, deadline)
            turns = message.messages if isinstance(message, Tokenize) else None
            self._pass_on(request, turns, pictures, convert(message, request.rid, session.number))


def _greeting_missing(message: ClientMessage) -> MessageError:
    error = HearthError(
        "hello_required",
        "this connection has no session: send hello first (the daemon may have been restarted, "
        "or the lease has run out)",
    )
    return MessageError(error, getattr(message, "id", ""))
