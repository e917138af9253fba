"""One exception per error code of the protocol, and those that arise on this side."""

from hearth_client.protocol import Error, Usage


class HearthClientError(Exception):
    """Any failure: a stable `code`, a `message` of one sentence, and the `field` at fault or ''.

    `retry_after_s` is set where the daemon expects that waiting helps: seconds from its answer.
    `text` is what had come of a reply before it failed, and `usage` what it had taken.
    """

    code: str = "internal"
    retry_after_s: float | None = None
    text: str = ""
    usage: Usage | None = None

    def __init__(self, message: str, field: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        again = "" if self.retry_after_s is None else f", again in {self.retry_after_s:.3g} s"
        return f"{self.message} ({self.code}{f', {self.field}' if self.field else ''}{again})"


class RequestRefused(HearthClientError):  # noqa: N818 - this family is named like its codes
    """The request must change before it can work."""

    code = "invalid_value"


class ServiceFailed(HearthClientError):  # noqa: N818 - this family is named like its codes
    """The request was fine and the service could not take or finish it."""


class ConnectionFailed(HearthClientError):  # noqa: N818 - this family is named like its codes
    """The daemon cannot be reached, or the conversation with it broke."""

    code = "connection_failed"


class ServerError(ServiceFailed):
    """The server failed inside, or answered with a code that this client does not know."""


class ReplyEmpty(HearthClientError):  # noqa: N818 - named like the others
    """A reply is no turn of a conversation: it has no text and no call that is whole."""

    code = "reply_empty"


# --- the request must change ----------------------------------------------------------------


class InvalidValue(RequestRefused):
    """A field has a wrong type or is outside its range."""

    code = "invalid_value"


class UnsupportedOption(RequestRefused):
    """The server does not offer this option."""

    code = "unsupported_option"


class GrammarInvalid(RequestRefused):
    """A schema, regex or grammar cannot be enforced: the message names the keyword."""

    code = "grammar_invalid"


class PromptEmpty(RequestRefused):
    """The prompt has no text to continue."""

    code = "prompt_empty"


class PromptTooLong(RequestRefused):
    """The prompt has more tokens than `limits.prompt_tokens`."""

    code = "prompt_too_long"


class CapacityExceeded(RequestRefused):
    """Prompt and `max_tokens` together exceed `limits.total_tokens`."""

    code = "capacity_exceeded"


class BadMessage(RequestRefused):
    """The bytes were not a message of the protocol."""

    code = "bad_message"


class MessageTooLarge(RequestRefused):
    """The message has more bytes than `limits.frame_bytes`."""

    code = "message_too_large"


class UnknownMessage(RequestRefused):
    """The server has no message of this type."""

    code = "unknown_message"


class DuplicateId(RequestRefused):
    """Another request of this connection with the same id is still open."""

    code = "duplicate_id"


class RepeatedFailure(RequestRefused):
    """A process of the engine died each time that it had this request: do not send it again."""

    code = "repeated_failure"


class AdapterUnknown(RequestRefused):
    """No adapter has that name, or it was removed before the request had ended."""

    code = "adapter_unknown"


class CacheFull(RequestRefused):
    """The pins of this client would take too much of the prefix cache."""

    code = "cache_full"


class ImageInvalid(RequestRefused):
    """A picture cannot be read, or is not what the message says of it."""

    code = "image_invalid"


class ImageTooLarge(RequestRefused):
    """A picture has too many bytes or pixels."""

    code = "image_too_large"


class ImageTimeout(RequestRefused):
    """A picture took too long to decode."""

    code = "image_timeout"


# --- the service could not take or finish it ------------------------------------------------


class QueueFull(ServiceFailed):
    """Too much work waits already; try again later."""

    code = "queue_full"


class TooManyClients(ServiceFailed):
    """The daemon serves as many clients as it may."""

    code = "too_many_clients"


class TooManyRequests(ServiceFailed):
    """The client has as many open requests as it may."""

    code = "too_many_requests"


class DeadlineExceeded(ServiceFailed):
    """The time given by `deadline_s` ran out."""

    code = "deadline_exceeded"


class ShuttingDown(ServiceFailed):
    """The daemon is about to stop."""

    code = "shutting_down"


class ExecutorFailed(ServiceFailed):
    """The process that runs the engine died; the daemon restarts it."""

    code = "executor_failed"


class EncoderFailed(ServiceFailed):
    """The process that looks at pictures died; the daemon restarts it."""

    code = "encoder_failed"


class WeightsInvalid(ServiceFailed):
    """A file of the model was cut short or changed on the daemon's machine: status names it."""

    code = "weights_invalid"


class CancelledByOperator(ServiceFailed):
    """The daemon's operator has ended the request."""

    code = "cancelled_by_operator"


class NonFinite(ServiceFailed):
    """The engine computed a value that is not a number."""

    code = "non_finite"


class OutOfMemory(ServiceFailed):
    """The device has no memory for the request; try later, or ask for less."""

    code = "out_of_memory"


class SlowClient(ServiceFailed):
    """The client did not read its answers in time."""

    code = "slow_client"


class LeaseExpired(ServiceFailed):
    """The client was silent for longer than its lease, and its requests were ended."""

    code = "lease_expired"


# --- the conversation -----------------------------------------------------------------------


class UnsupportedProtocol(ConnectionFailed):
    """Client and server have no protocol number in common."""

    code = "unsupported_protocol"


class ConnectionTimeout(ConnectionFailed):
    """The daemon did not answer in time."""

    code = "connection_timeout"


class ConnectionRefused(ConnectionFailed):
    """Nobody listens at the daemon's socket, or there is none."""

    code = "connection_refused"


class NotAllowed(ConnectionFailed):
    """The daemon's socket is for others: for members of its group, on TCP for keys it lists."""

    code = "not_allowed"


class ConnectionLost(ConnectionFailed):
    """The daemon went away or was restarted; its open requests are gone."""

    code = "connection_lost"


class ProtocolViolation(ConnectionFailed):
    """The server sent something that the protocol does not allow."""

    code = "protocol_violation"


class ClientClosed(ConnectionFailed):
    """The client object was closed."""

    code = "client_closed"


class ClientShared(ConnectionFailed):
    """Another thread uses the client at this moment, or another process opened its session."""

    code = "client_shared"


_SENT: list[type[HearthClientError]] = [
    *RequestRefused.__subclasses__(),
    *ServiceFailed.__subclasses__(),
    UnsupportedProtocol,
    NotAllowed,
]
_BY_CODE = {kind.code: kind for kind in _SENT}
# The server no longer knows this connection: it was restarted, or it ended the session.
_BY_CODE["hello_required"] = ConnectionLost


def error_for(answer: Error) -> HearthClientError:
    """The exception for an `error` answer; a code unknown here becomes a ServerError."""
    kind = _BY_CODE.get(answer.code, ServerError)
    code = answer.code if kind is ServerError else kind.code
    error = kind(answer.message, answer.field, code)
    error.retry_after_s, error.usage = answer.retry_after_s, answer.usage
    return error
