"""The exit codes of `hearth serve`; docs/operations.md has their table."""

from runtime.errors import HearthError

STOPPED = 0
FAILED = 1
EXECUTOR_FAILED = 69
EXECUTOR_STUCK = 71
CONFIGURATION = 78
FORCED = 130

# Numbers as in sysexits.h, which service managers show by name.
_CODES = {
    "executor_failed": EXECUTOR_FAILED,
    "executor_stuck": EXECUTOR_STUCK,
    "invalid_value": CONFIGURATION,
    "unsupported_option": CONFIGURATION,
    "model_unsupported": CONFIGURATION,
    "model_invalid": CONFIGURATION,
    "engine_missing": CONFIGURATION,
    "engine_corrupt": CONFIGURATION,
    "engine_incompatible": CONFIGURATION,
    "tokenizer_mismatch": CONFIGURATION,
    "wrong_answer": CONFIGURATION,
    "socket_unusable": CONFIGURATION,
}


def exit_code(error: HearthError) -> int:
    """What the daemon ends with after this error."""
    return _CODES.get(error.code, FAILED)
