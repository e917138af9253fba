"""Scenes of the conformance suite fail for clients that do wrong."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from clients.conformance import test_answers as answers
from clients.conformance import test_requests as requests
from clients.conformance import test_sessions as sessions
from clients.conformance.driving import Client, Driver
from clients.conformance.scripted import Peer
from tests.clients.vectors import CLIENTS

DRIVER = """\
import runpy
import sys

sys.path.insert(0, {python!r})
from hearth_client import async_session, connection, errors

{mutation}
sys.argv[0] = {driver!r}
runpy.run_path({driver!r}, run_name="__main__")
"""
CONNECTION = "connection.Connection"
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
RENEWS_BY_ANSWERS = f"""
def receive(self, data, now, right={CONNECTION}.receive):
    found = right(self, data, now)
    self._renewed(now)
    return found

{CONNECTION}.receive = receive
"""
Scene = Callable[[Driver, Peer], None]
ANSWERS: dict[str, tuple[str, Scene]] = {
    "takes any seq": (
        TAKES_ANY_SEQ,
        lambda driver, peer: answers.test_a_seq_that_is_not_the_next_ends_its_request_alone(
            driver, peer, [0, 2]
        ),
    ),
    "goes on behind the end": (
        NOTHING_ENDS,
        lambda driver, peer: answers.test_nothing_follows_the_first_terminal_answer(
            driver, peer, "done", "error"
        ),
    ),
    "fails for unknown codes": (
        UNKNOWN_CODES_END_THE_SESSION,
        answers.test_an_unknown_code_is_an_error_of_the_service,
    ),
    "reads on behind bytes of no meaning": (
        LENIENT,
        lambda driver, peer: answers.test_bytes_that_cannot_be_read_end_the_session(
            driver, peer, "no msgpack"
        ),
    ),
    "checks no size": (
        f"{CONNECTION}._check_size = lambda self, data: None",
        requests.test_sizes_are_checked_before_anything_is_sent,
    ),
    "checks no picture": (
        f"{CONNECTION}._check_frames = lambda self, frames: None",
        requests.test_sizes_are_checked_before_anything_is_sent,
    ),
}
SESSIONS: dict[str, tuple[str, Scene]] = {
    "renews nothing": (
        f"{CONNECTION}.renewal = lambda self, now: None",
        sessions.test_the_lease_is_kept_while_nothing_is_asked,
    ),
    "renews by answers": (
        RENEWS_BY_ANSWERS,
        lambda driver, peer: sessions.test_the_lease_is_kept_by_the_clock(driver, peer, "reads"),
    ),
    "does not cancel": (
        f"{CONNECTION}.cancel = lambda self, exchange: None",
        lambda driver, peer: sessions.test_cancel_is_sent_and_done_ends_it(driver, peer, "queued"),
    ),
    "insists on its features": (
        f"{CONNECTION}.hello_again = lambda self: None",
        sessions.test_an_old_server_is_greeted_again_without_features,
    ),
    "waits for the silent": (
        "async_session.AsyncSession._no_answer = lambda self: errors.ConnectionLost('')",
        sessions.test_silence_is_a_loss,
    ),
    "knows no loss": (
        f"{CONNECTION}._fault = lambda self, message: None",
        sessions.test_hello_required_loses_everything_once,
    ),
}


@pytest.mark.parametrize("name", [*ANSWERS, *SESSIONS])
def test_a_scene_fails_for_a_client_that(
    name: str, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation, scene = (ANSWERS | SESSIONS)[name]
    python = CLIENTS / "python"
    program = short_folder / "driver.py"
    program.write_text(
        DRIVER.format(python=str(python), driver=str(python / "driver.py"), mutation=mutation)
    )
    script = short_folder / "driver"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    script.chmod(0o755)
    # Some wait for what never comes.
    monkeypatch.setattr(Driver, "patience_s", 5.0)
    with (
        zmq.Context() as context,
        Peer(short_folder / "s", context) as peer,
        Driver(Client("mutant", short_folder), peer.address) as driver,
    ):
        if name in ANSWERS:
            peer.greet(driver)
        with pytest.raises((AssertionError, KeyError)):
            scene(driver, peer)
