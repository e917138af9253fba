import re
from pathlib import Path

import pytest

from daemon import exit_codes
from daemon.exit_codes import CONFIGURATION, EXECUTOR_FAILED, EXECUTOR_STUCK, FAILED, exit_code
from runtime.errors import CODES, Code, HearthError

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def test_every_exit_code_stands_in_the_table() -> None:
    table = OPERATIONS.read_text().split("## Exit codes")[1].split("\n## ")[0]
    documented = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    ours = {value for name, value in vars(exit_codes).items() if name.isupper() and name[0] != "_"}
    assert documented == ours | {2}


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("executor_failed", EXECUTOR_FAILED),
        ("executor_stuck", EXECUTOR_STUCK),
        ("invalid_value", CONFIGURATION),
        ("engine_corrupt", CONFIGURATION),
        ("already_running", FAILED),
        ("internal", FAILED),
    ],
)
def test_a_service_manager_can_tell_failures_apart(code: Code, number: int) -> None:
    assert exit_code(HearthError(code, "it failed")) == number


def test_only_known_codes_have_a_number_of_their_own() -> None:
    assert set(exit_codes._CODES) <= CODES
