"""The one exception family of Hearth: a code for programs, a sentence and a field for people."""

from typing import Literal, cast, get_args

Code = Literal[
    # The request is at fault.
    "invalid_value",
    "unsupported_option",
    "prompt_empty",
    "prompt_too_long",
    "capacity_exceeded",
    "cache_full",
    "grammar_invalid",
    "image_invalid",
    "image_too_large",
    "image_timeout",
    # The service cannot take or finish it.
    "queue_full",
    "deadline_exceeded",
    "shutting_down",
    "executor_failed",
    "executor_stuck",
    "encoder_failed",
    "repeated_failure",
    "device_lost",
    "non_finite",
    "internal",
    # The adapter is at fault, or there is none of that name.
    "adapter_invalid",
    "adapter_unknown",
    # The model, engine folder or device is at fault.
    "model_unsupported",
    "model_invalid",
    "engine_missing",
    "engine_corrupt",
    "engine_incompatible",
    "weights_invalid",
    "wrong_answer",
    "spill_failed",
    "spill_invalid",
    "tokenizer_mismatch",
    "out_of_memory",
    # The conversation with a client is at fault (daemon; `clients/PROTOCOL.md` has the table).
    "bad_message",
    "message_too_large",
    "unknown_message",
    "hello_required",
    "unsupported_protocol",
    "not_allowed",
    "too_many_clients",
    "too_many_requests",
    "duplicate_id",
    "slow_client",
    "lease_expired",
    "cancelled_by_operator",
    # What the daemon's owner asks for is not there.
    "unknown_request",
    # The daemon cannot open its socket.
    "already_running",
    "socket_unusable",
]
CODES: frozenset[str] = frozenset(get_args(Code))


def known_code(code: str) -> Code:
    """Code from another process, `internal` where this one does not know it."""
    return cast("Code", code) if code in CODES else "internal"


class HearthError(Exception):
    """A failure with a stable `code`, a `message` of one sentence and the `field` at fault."""

    def __init__(self, code: Code, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return f"{self.message} ({self.code}{f', {self.field}' if self.field else ''})"
