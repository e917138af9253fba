"""The exit codes of `hearth serve`; docs/operations.md has their table."""

import sys

import structlog

from hearth.runtime.errors import HearthError

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

STOPPED = 0
FAILED = 1
EXECUTOR_FAILED = 69
EXECUTOR_STUCK = 71
CONFIGURATION = 78
FORCED = 130

# Numbers as in sysexits.h, which service managers show by name.
_CODES = {
    "executor_failed": EXECUTOR_FAILED,
    "encoder_failed": EXECUTOR_FAILED,
    "executor_stuck": EXECUTOR_STUCK,
    "invalid_value": CONFIGURATION,
    "unsupported_option": CONFIGURATION,
    "model_unsupported": CONFIGURATION,
    "model_invalid": CONFIGURATION,
    "engine_missing": CONFIGURATION,
    "engine_corrupt": CONFIGURATION,
    "engine_incompatible": CONFIGURATION,
    "weights_invalid": CONFIGURATION,
    "tokenizer_mismatch": CONFIGURATION,
    "wrong_answer": CONFIGURATION,
    "socket_unusable": CONFIGURATION,
}


def exit_code(error: HearthError) -> int:
    """Exit code of the daemon after this error."""
    return _CODES.get(error.code, FAILED)


def reason_of(error: BaseException) -> HearthError:
    """The HearthError among what a part raised; anything else is logged and becomes `internal`."""
    known = _find(error)
    if known is not None:
        return known
    structlog.get_logger("hearth").error("a part of the daemon failed", exc_info=error)
    return HearthError("internal", "the daemon failed, its log tells why: start it again")


def _find(error: BaseException) -> HearthError | None:
    if isinstance(error, BaseExceptionGroup):
        return next((found for one in error.exceptions if (found := _find(one))), None)
    return error if isinstance(error, HearthError) else None
