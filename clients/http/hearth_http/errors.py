"""The one exception of this door, and the HTTP status of each code of the daemon."""

import math
from collections.abc import Callable
from typing import Any

from hearth_client import errors as client

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, TOO_LARGE = 400, 401, 403, 404, 413
_TOO_MANY, INTERNAL, UNAVAILABLE = 429, 500, 503
_STATUS = {
    "message_too_large": TOO_LARGE,
    **dict.fromkeys(("queue_full", "too_many_clients", "too_many_requests"), _TOO_MANY),
    "deadline_exceeded": 504,
    **dict.fromkeys(("internal", "non_finite"), INTERNAL),
}
"""Status of a code; that of others is 400 for a refused request, and 503."""
_KINDS = {
    UNAUTHORIZED: "authentication_error",
    FORBIDDEN: "permission_error",
    _TOO_MANY: "rate_limit_error",
}
_NOT_AGAIN = {"cancelled_by_operator", "deadline_exceeded", "non_finite", "repeated_failure"}
"""Failures that come again with the same request, or that are a person's matter."""
_RETRY_S = 1.0
"""Seconds to wait where the daemon names none."""


class ApiError(Exception):
    """A request that is not answered as asked: `status`, `code`, a sentence, the field at fault.

    `again` says whether the same request may be sent once more, `retry_after_s` when; None says
    nothing.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        field: str = "",
        *,
        retry_after_s: float | None = None,
        again: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.field = status, code, message, field
        self.retry_after_s, self.again = retry_after_s, again

    @property
    def headers(self) -> dict[str, str]:
        """Headers that say when to come again, and whether."""
        found = {}
        if self.retry_after_s is not None:
            found["retry-after"] = str(math.ceil(self.retry_after_s))
            found["retry-after-ms"] = str(math.ceil(self.retry_after_s * 1000))
        if self.again is not None:
            found["x-should-retry"] = "true" if self.again else "false"
        return found

    @property
    def openai(self) -> dict[str, Any]:
        """The body of OpenAI's API, and of its streams."""
        other = "server_error" if self.status >= INTERNAL else "invalid_request_error"
        kind = _KINDS.get(self.status, other)
        told = {"message": self.message, "type": kind, "param": self.field or None}
        return {"error": {**told, "code": self.code}}

    @property
    def ollama(self) -> dict[str, Any]:
        """The body of Ollama's API, with what it does not have beside it."""
        return {"error": self.message, "code": self.code, "field": self.field}


def invalid(field: str, message: str) -> ApiError:
    """A field of a wrong shape."""
    return ApiError(BAD_REQUEST, "invalid_value", f"{field} {message}", field)


def unsupported(field: str, message: str) -> ApiError:
    """A field, or a value of it, that is not offered here."""
    return ApiError(BAD_REQUEST, "unsupported_option", f"{field} {message}", field)


def of_client(error: client.HearthClientError, renamed: Callable[[str], str]) -> ApiError:
    """The answer for a failure of the client; `renamed` gives the API's name of a field."""
    if isinstance(error, client.AdapterUnknown):
        text = "there is no such model here: GET /v1/models lists them"
        return ApiError(NOT_FOUND, "model_not_found", text, renamed(error.field))
    if isinstance(error, client.ClientClosed):
        text = "this server stops: try again after its restart"
        return ApiError(UNAVAILABLE, "shutting_down", text, retry_after_s=_RETRY_S)
    other = BAD_REQUEST if isinstance(error, client.RequestRefused) else UNAVAILABLE
    status = _STATUS.get(error.code, other)
    after = error.retry_after_s
    if after is None and status in {_TOO_MANY, UNAVAILABLE}:
        after = _RETRY_S
    field = renamed(error.field) if error.field else ""
    message = error.message
    if field != error.field and message.startswith(error.field):
        message = field + message[len(error.field) :]
    if error.code in _NOT_AGAIN:
        return ApiError(status, error.code, message, field, again=False)
    return ApiError(status, error.code, message, field, retry_after_s=after)
