import re
import sys
from pathlib import Path

import pytest
import structlog

from hearth.daemon import exit_codes
from hearth.daemon.cli.errors import UNREAD, USAGE
from hearth.daemon.exit_codes import (
    CONFIGURATION,
    EXECUTOR_FAILED,
    EXECUTOR_STUCK,
    FAILED,
    exit_code,
    reason_of,
)
from hearth.runtime.errors import CODES, Code, HearthError

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def test_every_exit_code_stands_in_the_table() -> None:
    table = OPERATIONS.read_text().split("## Exit codes")[1].split("\n## ")[0]
    documented = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    ours = {value for name, value in vars(exit_codes).items() if name.isupper() and name[0] != "_"}
    assert documented == ours | {USAGE, UNREAD}


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("executor_failed", EXECUTOR_FAILED),
        ("executor_stuck", EXECUTOR_STUCK),
        ("invalid_value", CONFIGURATION),
        ("engine_corrupt", CONFIGURATION),
        ("weights_invalid", CONFIGURATION),
        ("already_running", FAILED),
        ("internal", FAILED),
    ],
)
def test_a_service_manager_can_tell_failures_apart(code: Code, number: int) -> None:
    assert exit_code(HearthError(code, "it failed")) == number


def test_only_known_codes_have_a_number_of_their_own() -> None:
    assert set(exit_codes._CODES) <= CODES


def test_the_error_of_a_part_is_found_wherever_it_was_raised() -> None:
    cause = HearthError("queue_full", "behind")
    group = ExceptionGroup("tasks", [ValueError(), ExceptionGroup("inner", [cause])])
    assert reason_of(group) is cause


def test_an_unforeseen_error_becomes_internal_and_is_logged() -> None:
    with structlog.testing.capture_logs() as logs:
        assert reason_of(ValueError("x")).code == "internal"
    assert logs[0]["log_level"] == "error"
    assert isinstance(logs[0]["exc_info"], ValueError)
