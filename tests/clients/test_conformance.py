"""Scenes of the conformance suite fail for clients that do wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.vectors import CLIENTS

pytestmark = pytest.mark.slow
DRIVER = """\
import runpy
import sys

sys.path.insert(0, {python!r})
from hearth_client import address, async_session, connection, errors, session

{mutation}
sys.argv[0] = {driver!r}
runpy.run_path({driver!r}, run_name="__main__")
"""
CONNECTION = "connection.Connection"
IN_ORDER = "test_a_seq_that_is_not_the_next_ends_its_request_alone and seqs1"
REFUSED = "test_sizes_are_checked_before_anything_is_sent"
TAKES_ANY_SEQ = f"""
def delta(self, message, right={CONNECTION}._delta):
    exchange = self._open.get(message.id)
    if exchange is not None:
        exchange.next_seq = message.seq
    return right(self, message)

{CONNECTION}._delta = delta
"""
NOTHING_ENDS = f"""
def other(self, message, right={CONNECTION}._other):
    exchange = self._open.get(message.id)
    found = right(self, message)
    if exchange is not None:
        self._open[exchange.id] = exchange
    return found

{CONNECTION}._other = other
"""
UNKNOWN_CODES_END_THE_SESSION = """
def error_for(answer, right=errors.error_for):
    if answer.code not in errors._BY_CODE:
        return errors.ProtocolViolation("an unknown code")
    return right(answer)

connection.error_for = error_for
"""
LENIENT = f"""
def receive(self, data, now, right={CONNECTION}.receive):
    before, self.lose = self.lose, lambda error: None
    try:
        return right(self, data, now)
    finally:
        self.lose = before

{CONNECTION}.receive = receive
"""
NEVER_LESS = "connection.Connection.hello_again = lambda self: None"
MUTATIONS = {
    "takes any seq": (TAKES_ANY_SEQ, IN_ORDER),
    "goes on behind the end": (NOTHING_ENDS, "test_nothing_follows_the_first and delta"),
    "fails for unknown codes": (UNKNOWN_CODES_END_THE_SESSION, "test_an_unknown_code"),
    "reads on behind bytes of no meaning": (LENIENT, "test_bytes_that_cannot_be_read"),
    "renews nothing": (f"{CONNECTION}.renewal = lambda self, now: None", "kept_by_the_clock"),
    "renews by answers": (
        (
            f"{CONNECTION}.receive = lambda self, data, now, right={CONNECTION}.receive: "
            "(right(self, data, now), self._renewed(now))[0]"
        ),
        "kept_by_the_clock and reads",
    ),
    "checks no size": (f"{CONNECTION}._check_size = lambda self, data: None", REFUSED),
    "checks no picture": (f"{CONNECTION}._check_frames = lambda self, frames: None", REFUSED),
    "does not cancel": (f"{CONNECTION}.cancel = lambda self, exchange: None", "cancel_is_sent"),
    "insists on its features": (NEVER_LESS, "test_an_old_server"),
    "waits for the silent": (
        "async_session.AsyncSession._no_answer = lambda self: errors.ConnectionLost('')",
        "test_silence_is_a_loss",
    ),
    "knows no absence": ("session.absence = lambda address: ''", "test_nobody_listens"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_scene_fails_for_a_client_that(name: str, tmp_path: Path) -> None:
    mutation, scene = MUTATIONS[name]
    python = CLIENTS / "python"
    program = tmp_path / "driver.py"
    program.write_text(
        DRIVER.format(python=str(python), driver=str(python / "driver.py"), mutation=mutation)
    )
    for script, line in (("check", "true"), ("driver", f'exec "$PYTHON" {program} "$@"')):
        (tmp_path / script).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / script).chmod(0o755)
    chosen = ["--client", "mutant", "--client-folder", str(tmp_path), "-k", scene]
    chosen += ["--timeout", "10"]  # Some wait for what never comes.
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "clients/conformance", *chosen],
        cwd=CLIENTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout
    assert "1 failed" in ran.stdout
