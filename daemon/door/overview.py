"""Overview of clients and open requests for the daemon's owner; without text of requests."""

import msgspec

from hearth.daemon.door.sessions import OpenRequest, Sessions
from hearth.daemon.door.state import DoorState


class OpenClient(msgspec.Struct, frozen=True):
    """A client: its name, the generations that it has open, and the tokens that it has got."""

    name: str
    open: int
    tokens: int


class RunningRequest(msgspec.Struct, frozen=True):
    """A generation that is open.

    `state` is `encoding` until the scheduler has taken it, `waiting` until its first token, then
    `replying`.
    """

    request: str
    client: str
    state: str
    prompt_tokens: int
    tokens: int
    age_s: float


def open_clients(sessions: Sessions) -> list[OpenClient]:
    """All clients that may ask for text."""
    found = []
    for session in sessions.all():
        if not session.status_only:
            running = [one for one in session.open.values() if one.kind == "generate"]
            tokens = session.tokens + sum(one.completion_tokens for one in running)
            found.append(OpenClient(session.client, len(running), tokens))
    return found


def generations(sessions: Sessions) -> list[OpenRequest]:
    """All open generations, the oldest first."""
    return [one for one in sessions.open_requests if one.kind == "generate"]


def running_request(one: OpenRequest, state: DoorState, now: float) -> RunningRequest:
    """Report of one open generation."""
    return RunningRequest(
        state.request_id(one.rid),
        one.session.client,
        _state_of(one),
        one.prompt_tokens,
        one.completion_tokens,
        now - one.opened,
    )


def tokens_of_replies(sessions: Sessions, state: DoorState) -> int:
    """Tokens of all replies since the start, those of open ones so far among them."""
    return state.tokens + sum(one.completion_tokens for one in sessions.open_requests)


def _state_of(request: OpenRequest) -> str:
    if request.completion_tokens:
        return "replying"
    return "waiting" if request.accepted else "encoding"
