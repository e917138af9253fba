"""Starts that end by themselves, ends by what failed later, and reloads."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from hearth.daemon import watchdog as notify_module
from hearth.daemon.cli.errors import Failure
from hearth.daemon.configuration.load import OLD_NAMES, load_settings
from hearth.daemon.configuration.settings import SETTINGS, Settings, replaced, settings_of
from hearth.daemon.door.keys import make_server_keys
from hearth.daemon.exit_codes import CONFIGURATION, EXECUTOR_FAILED, EXECUTOR_STUCK, FAILED, STOPPED
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.daemon.service import change_to, serve
from hearth.daemon.service_state import STATES, ServiceState, words
from hearth.daemon.supervision.restart_policy import stuck
from hearth.daemon.supervision.supervisor import Supervisor
from hearth.runtime.errors import HearthError
from hearth_client import Client

DEFAULTS = Settings()


def log_of(
    engine: Path,
    capsys: pytest.CaptureFixture[str],
    given: Settings = DEFAULTS,
    **values: str | int,
) -> str:
    """What a start says that these settings end before an actor has begun to load."""
    try:
        assert serve(replaced(given, log_format="json", **values), engine) == CONFIGURATION
    finally:
        structlog.reset_defaults()
    text = capsys.readouterr().err
    assert "actor" not in text
    return text


def test_a_missing_engine_is_logged_in_one_line_and_an_error_of_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = log_of(tmp_path / "none", capsys).splitlines()
    assert len(lines) == 1
    assert "engine_missing" in lines[0]


def test_old_names_are_told_of_at_the_start_whatever_the_log_level_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings(environ={}, flags=dict.fromkeys(OLD_NAMES, "2"))
    text = log_of(tmp_path / "none", capsys, given=settings, log_level="error")
    warning = json.loads(text.splitlines()[0])
    assert (warning["level"], warning["event"]) == ("warning", "settings have other names now")
    assert warning["reason"].endswith('give draft_tree = "2x2/2"')


def test_an_unusable_socket_ends_before_anything_is_loaded(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "s")
    assert "socket_unusable" in log_of(tiny_engine, capsys, socket=place)


@pytest.mark.parametrize("setting", ["metrics_port", "tcp_port"])
def test_a_port_that_is_taken_ends_before_anything_is_loaded(
    tiny_engine: Path, short_folder: Path, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    place, keys = short_folder / "s", short_folder / "keys"
    make_server_keys(keys)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = {"socket": str(place), "keys": str(keys), setting: port}
        text = log_of(tiny_engine, capsys, **taken)
    assert f"cannot listen on port {port} of 127.0.0.1 (Address already in" in text
    assert f'"field":"{setting}"' in text
    assert ("no client's key is listed" in text) == (setting == "tcp_port")
    assert not place.exists()


ASKED_EARLY = """
import signal, sys
from pathlib import Path
from hearth.daemon.configuration.settings import settings_of
from hearth.daemon.signals import held_signals
with held_signals() as send_again:
    signal.raise_signal(signal.SIGTERM)
    from hearth.daemon.service import serve
    settings = settings_of(socket=sys.argv[1], engine_kind="simulated", log_format="json")
    sys.exit(serve(settings, Path(sys.argv[2]), send_again=send_again))
"""


def test_a_stop_that_is_asked_for_while_a_daemon_begins_is_heard(
    tiny_engine: Path, short_folder: Path
) -> None:
    command = [sys.executable, "-c", ASKED_EARLY, str(short_folder / "s"), str(tiny_engine)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == STOPPED, ended.stderr
    assert '"event":"stopping","signal":"SIGTERM"' in ended.stderr


LOST = HearthError("executor_failed", "the executor was lost, 3 restarts did not help: it crashed")
WRONG = HearthError("wrong_answer", "the engine does not compute its model", "engine")


@pytest.mark.parametrize(
    "end",
    [
        (LOST, EXECUTOR_FAILED, LOST.message),
        (stuck("executor", "it crashed"), EXECUTOR_STUCK, "restart the machine"),
        (WRONG, CONFIGURATION, WRONG.message),
        (HearthError("queue_full", "the mailbox is full"), FAILED, "the mailbox is full"),
        (ValueError("a fault"), FAILED, "its log tells why"),
    ],
    ids=lambda end: end[1],
)
def test_each_failure_has_its_code_and_its_last_words(
    tiny_engine: Path,
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: tuple[Exception, int, str],
) -> None:
    error, code, words = end

    async def run(_supervisor: Supervisor) -> None:
        raise error

    told: list[str] = []
    monkeypatch.setattr(Supervisor, "run", run)
    monkeypatch.setattr(notify_module, "notify", told.append)
    settings = settings_of(socket=str(short_folder / "s"), log_format="json")
    assert serve(settings, tiny_engine) == code
    structlog.reset_defaults()
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert told[-1].startswith("STATUS=failed (")
    assert words in told[-1]
    assert [path.name for path in short_folder.iterdir()] == ["s.lock"]


OTHER = settings_of(clients=7, hold_s=9.0, threads=3, log_level="debug", engine="other")


def test_what_differs_is_taken_or_named_in_the_order_of_the_settings() -> None:
    change = change_to(Settings(), OTHER)
    assert change.changed == ["hold_s", "clients", "log_level"]
    assert change.needs_restart == ["engine", "threads"]
    assert change.settings == settings_of(clients=7, hold_s=9.0, log_level="debug")


def test_what_needs_a_restart_is_named_until_it_has_come_or_is_taken_back() -> None:
    once = change_to(Settings(), OTHER).settings
    again = change_to(once, OTHER)
    assert (again.changed, again.needs_restart) == ([], ["engine", "threads"])
    back = change_to(once, replaced(OTHER, engine="", threads=0))
    assert (back.changed, back.needs_restart) == ([], [])


@pytest.mark.parametrize("name", ["engine", "socket", "max_batch", "ageing_s", "prefill_budget"])
def test_what_is_fixed_at_the_start_is_not_reloaded(name: str) -> None:
    assert not SETTINGS[name].declared.reloads


@given(st.sets(st.sampled_from(sorted(SETTINGS))))
def test_each_setting_is_on_one_side(names: set[str]) -> None:
    other = settings_of(**{name: object() for name in names})
    change = change_to(Settings(), other)
    assert {*change.changed, *change.needs_restart} == names
    waits = {"weights"} if "engine" in names else set()
    assert {*change.changed} == {name for name in names if SETTINGS[name].declared.reloads} - waits
    for name in SETTINGS:
        source = other if name in change.changed else Settings()
        assert SETTINGS[name].of(change.settings) == SETTINGS[name].of(source)


def test_weights_wait_for_the_engine_that_they_were_made_for() -> None:
    running = settings_of(engine="a")
    alone = change_to(running, settings_of(engine="a", weights="w"))
    assert (alone.changed, alone.needs_restart) == (["weights"], [])
    both = change_to(running, settings_of(engine="b", weights="w", hold_s=3.0))
    assert (both.changed, both.needs_restart) == (["hold_s"], ["engine", "weights"])
    assert both.settings == settings_of(engine="a", hold_s=3.0)


def test_a_start_goes_through_its_stages_to_ready() -> None:
    state = ServiceState()
    assert words(*state) == "starting"
    state = state.loading("verifying", 0.434)
    assert words(*state) == "loading: verifying, 43%"
    state = state.loading("opening", None)
    assert words(*state) == "loading: opening"
    assert state.ready() == ServiceState("ready")
    assert words(*state.ready()) == "ready"


def test_the_reason_of_a_loss_stays_until_the_next_executor_is_ready() -> None:
    lost = ServiceState("ready").lost("it was ended by SIGKILL")
    assert words(*lost) == "starting (the executor was lost: it was ended by SIGKILL)"
    again = lost.loading("capturing", 0.5)
    assert (
        words(*again) == "loading: capturing, 50% (the executor was lost: it was ended by SIGKILL)"
    )
    assert again.lost("it did not load within 5 s").reason.endswith("it did not load within 5 s")
    assert again.ready() == ServiceState("ready")


def test_nothing_is_taken_in_from_a_cut_file_until_an_executor_is_ready() -> None:
    held = (
        ServiceState("ready")
        .lost("weights is cut short")
        .held("weights is cut short", refuses=True)
    )
    assert words(*held) == "starting: requests are refused (weights is cut short)"
    assert held.loading("opening", None).lost("again") == held
    assert held.loading("opening", None).ready() == ServiceState("ready")
    assert not ServiceState().held("weights is changed in place", refuses=False).refuses


def test_a_stop_is_not_undone_by_the_executor() -> None:
    state = ServiceState("ready").draining("SIGTERM")
    assert words(*state) == "draining (SIGTERM)"
    assert state.loading("opening", None) == state.ready() == state.lost("gone") == state
    assert state.draining("a second SIGTERM").reason == "a second SIGTERM"


def test_a_failure_is_the_end_and_stands_on_one_line() -> None:
    state = ServiceState("draining", reason="SIGTERM").failed("the executor\nwas lost")
    assert words(*state) == "failed (the executor was lost)"
    assert state.draining("SIGTERM") == state.ready() == state


EVENTS = {
    "loading": lambda state: state.loading("opening", None),
    "ready": lambda state: state.ready(),
    "lost": lambda state: state.lost("gone"),
    "held": lambda state: state.held("cut", refuses=True),
    "draining": lambda state: state.draining("SIGTERM"),
    "failed": lambda state: state.failed("broken"),
}
"""Each is named by the state that it leads to, but for the loss and the wait for files."""


@given(st.lists(st.sampled_from(sorted(EVENTS))))
def test_whatever_happens_the_state_is_known_and_ends_are_final(events: list[str]) -> None:
    state = ServiceState()
    for event in events:
        before, state = state, EVENTS[event](state)
        assert state.state in STATES
        order = ["draining", "failed"]
        if before.state in order:
            assert state.state in order[order.index(before.state) :]
        else:
            assert state.state == {"lost": "starting", "held": "starting"}.get(event, event)


def test_it_is_ready_inside_and_gone_after(tiny_engine: Path) -> None:
    with own_daemon(tiny_engine, ("--engine-kind", "simulated")) as daemon:
        with Client(daemon.socket) as client:
            assert client.status().state == "ready"
        assert '"event":"ready"' in daemon.log()
        daemon.stop()
    assert not daemon.socket.parent.exists()


def test_one_that_cannot_start_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"did not start: .*engine_missing"):
        own_daemon(tmp_path / "none").__enter__()


def test_waiting_for_one_that_runs_on_has_a_limit(tiny_engine: Path, short_folder: Path) -> None:
    daemon = OwnDaemon(short_folder, tiny_engine)
    try:
        with pytest.raises(Failure, match="did not stop in time"):
            daemon.wait(0.05)
        with pytest.raises(Failure, match="is not ready after 0 s"):
            daemon.wait_until_ready(0)
    finally:
        daemon.kill()
    assert daemon.wait(1) == -9


def test_the_user_s_own_settings_do_not_reach_it(
    tiny_engine: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_MAX_BATCH", "none of its concern")
    daemon = OwnDaemon(short_folder, tiny_engine)
    try:
        daemon.wait_until_ready()
    finally:
        daemon.kill()
