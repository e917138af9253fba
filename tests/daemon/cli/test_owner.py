"""Commands that ask or tell a daemon: status, clients, keys, reload and adapter."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import zmq
from click.testing import CliRunner, Result
from msgspec import structs

from hearth.daemon.cli import adapter as adapter_module
from hearth.daemon.cli import clients
from hearth.daemon.cli import status as module
from hearth.daemon.cli.clients import connected, daemon_address, explained
from hearth.daemon.cli.errors import Failure
from hearth.daemon.cli.keys import keys
from hearth.daemon.cli.status import executor_rows
from hearth.daemon.control.messages import AdapterAdded, AddAdapter, Reload, Reloaded
from hearth.daemon.door.keys import read_keys
from hearth.daemon.shipped_files import ADAPTERS, MODELS, PICTURE, shipped_model, shipped_picture
from hearth.runtime.errors import HearthError
from hearth_client import (
    Client,
    ConnectionTimeout,
    ExecutorReport,
    QueueFull,
    StageReport,
    StatusReport,
)
from hearth_client.protocol import ImagesReport, PrefixReport, SpeculationReport
from tests.daemon.door.harness import running_door


class FakeClient:
    def status(self) -> StatusReport:
        return StatusReport(
            id="1",
            server="hearth 0.1.0",
            model="home",
            state="ready",
            uptime_s=12.5,
            clients=2,
            running=1,
            queued=3,
            queued_tokens=40,
            totals={"requests": 9},
            engine={"dtype": "float32"},
            executor=ExecutorReport(
                prefill=StageReport(steps=2, tokens=40, seconds=0.5),
                generation=StageReport(steps=3, tokens=5, seconds=0.25),
            ),
        )


@pytest.fixture
def _client(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def connected(
        _socket: str | None, _key: str | None, *, status_only: bool, name: str
    ) -> Iterator[FakeClient]:
        assert (status_only, name) == (True, "hearth-status")
        yield FakeClient()

    monkeypatch.setattr(module, "connected", connected)


@pytest.mark.usefixtures("_client")
def test_people_get_a_table() -> None:
    text = CliRunner().invoke(module.status).output
    for words in (
        "ready",
        "home",
        "1 running, 3 queued",
        "float32",
        "40 tokens in 2",
        "total requests",
    ):
        assert words in text


@pytest.mark.usefixtures("_client")
def test_programs_get_one_object_without_the_protocol_s_own_fields() -> None:
    report = json.loads(CliRunner().invoke(module.status, ["--json"]).output)
    assert report["queued_tokens"] == 40
    assert report["executor"]["generation"]["steps"] == 3
    assert report["engine"] == {"dtype": "float32"}
    assert not {"t", "id"} & set(report)


@pytest.mark.usefixtures("_client")
def test_the_state_is_told_in_the_words_of_the_service_manager() -> None:
    report = structs.replace(
        FakeClient().status(), state="loading", stage="verifying", share=0.5, reason="it was lost"
    )
    assert ("state", "loading: verifying, 50% (it was lost)") in module._rows(report)


PREFILL = StageReport(steps=2, tokens=40, seconds=0.5)
NOTHING = StageReport(steps=0, tokens=0, seconds=0.0)


def test_each_stage_is_a_row_and_work_not_done_has_no_speed() -> None:
    assert executor_rows(ExecutorReport(prefill=PREFILL, generation=NOTHING)) == [
        ("prefill", "40 tokens in 2 steps, 0.5 s, 80 tokens/s"),
        ("generation", "0 tokens in 0 steps, 0.0 s"),
    ]


def test_speculation_has_its_length_positions_and_times() -> None:
    speculation = SpeculationReport(
        rounds=4,
        drafted=20,
        accepted=9,
        accept_length=2.25,
        steps=4,
        accepted_by_position=[4, 3, 2],
        draft_s=0.1,
        verify_s=0.2,
        commit_s=0.3,
    )
    report = ExecutorReport(prefill=PREFILL, generation=PREFILL, speculation=speculation)
    assert executor_rows(report)[2:] == [
        ("speculation", "9 tokens in 4 rounds, 20 drafted, accept length 2.25"),
        ("accepted by position", "100% 75% 50%"),
        ("speculation time", "draft 0.1 s, verify 0.2 s, commit 0.3 s"),
    ]


@pytest.mark.parametrize(("encoded", "told"), [(0, ""), (1, ", 1 encoded in 0.5 s")])
def test_images_tell_what_they_took(encoded: int, told: str) -> None:
    images = ImagesReport(
        images=2, tokens=98, merge_seconds=0.25, encoded=encoded, encode_seconds=0.5
    )
    report = ExecutorReport(prefill=PREFILL, generation=PREFILL, images=images)
    assert executor_rows(report)[2:] == [("images", f"2 as 98 tokens, merged in 0.2 s{told}")]


def test_a_prefix_cache_tells_what_it_saved_and_holds() -> None:
    held = {"device": 3 << 20, "disk": 0}
    cache = PrefixReport(rows=4, hits=3, queried=400, reused=300, bytes=held)
    report = ExecutorReport(prefill=PREFILL, generation=PREFILL, prefix=cache)
    assert executor_rows(report)[2:] == [
        ("prefix cache", "300 of 400 tokens reused (75%), device 3.0 MiB")
    ]
    fresh = PrefixReport(rows=0, hits=0, queried=0, reused=0)
    report = ExecutorReport(prefill=PREFILL, generation=PREFILL, prefix=fresh)
    assert executor_rows(report)[2:] == [("prefix cache", "0 of 0 tokens reused")]


def test_the_address_is_the_flag_s_then_the_settings_then_the_agreed_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "h.toml"
    file.write_text('socket = "/from/file"')
    monkeypatch.setenv("HEARTH_CONFIG", str(file))
    monkeypatch.delenv("HEARTH_SOCKET", raising=False)
    assert daemon_address("/given") == "/given"
    assert daemon_address(None) == "/from/file"
    monkeypatch.setenv("HEARTH_SOCKET", "/from/env")
    assert daemon_address(None) == "/from/env"
    monkeypatch.delenv("HEARTH_SOCKET")
    monkeypatch.delenv("HEARTH_CONFIG")
    assert daemon_address(None) is None


def test_without_a_daemon_the_failure_comes_at_once_and_says_what_to_do(
    short_folder: Path,
) -> None:
    path = short_folder / "s"
    with (
        pytest.raises(Failure, match=r"No such file.*start one with hearth serve"),
        connected(str(path)),
    ):
        pass
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left_over:
        left_over.bind(str(path))
    with pytest.raises(Failure, match="Connection refused"), connected(str(path)):
        pass


def test_a_path_that_cannot_be_a_socket_is_a_failure() -> None:
    with pytest.raises(Failure, match="at most 107"), connected("/x" * 60):
        pass


def test_the_client_s_exceptions_become_failures() -> None:
    with pytest.raises(Failure, match=r"full \(queue_full\)"), explained():
        raise QueueFull("full")


def test_a_socket_of_others_is_not_called_a_missing_daemon(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = short_folder / "s"
    path.touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(Failure, match=r"not allowed .* join the group"), connected(str(path)):
        pass


def test_who_waits_is_told_and_served_once_there_is_a_daemon(
    short_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = short_folder / "s", threading.Event()
    echo = click.echo

    def say(*words: Any, **how: Any) -> None:
        echo(*words, **how)
        told.set()

    monkeypatch.setattr(click, "echo", say)
    states: list[str] = []

    def wait() -> None:
        with connected(str(path), wait=True, name="hearth-chat") as client:
            states.append(client.status().state)

    thread = threading.Thread(target=wait)
    thread.start()
    assert told.wait(10)
    with running_door(path=path):
        thread.join(20)
    assert states == ["ready"]
    assert "No such file or directory): waiting for hearth serve" in capsys.readouterr().err


@pytest.mark.parametrize("status_only", [False, True])
def test_a_daemon_that_is_started_by_its_first_client_is_waited_for(
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status_only: bool,  # noqa: FBT001 - a parameter
) -> None:
    """But not by who asks for its state."""
    path = short_folder / "s"
    made: list[Client] = []

    class Slow(Client):
        def connect(self) -> Any:
            made.append(self)
            if len(made) == 1:
                raise ConnectionTimeout("no answer")

    monkeypatch.setattr(clients, "Client", Slow)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as manager:
        manager.bind(str(path))
        manager.listen()
        if status_only:
            with pytest.raises(Failure, match="no answer"), connected(str(path), status_only=True):
                pass
        else:
            with connected(str(path)) as client:
                assert client is made[1]
            assert "waiting for the daemon to start" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEARTH_KEYS", str(tmp_path / "keys"))
    return tmp_path / "keys"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(keys, arguments)


@pytest.mark.usefixtures("folder")
def test_keys_are_made_listed_and_removed(folder: Path, tmp_path: Path) -> None:
    made = run("init")
    public = read_keys(folder).public
    assert made.stdout == f"{public}\n"
    assert str(folder) in made.stderr
    said = run("add", "robot").output
    assert "wrote robot.key_secret: hand it to the client alone" in said
    assert "hearth reload" in said
    assert (tmp_path / "robot.key_secret").exists()
    assert run("add", "arm", "--out", "own").exit_code == 0
    assert (tmp_path / "own").exists()
    lines = [line.split() for line in run("list").output.splitlines()]
    named = {name: key for key, name in read_keys(folder).clients.items()}
    assert lines == [["(daemon)", public], ["arm", named["arm"]], ["robot", named["robot"]]]
    assert json.loads(run("list", "--json").output) == {"daemon": public, "clients": named}
    assert "hearth reload" in run("remove", "arm").output
    assert list(read_keys(folder).clients.values()) == ["robot"]


@pytest.mark.usefixtures("folder")
def test_a_key_made_elsewhere_is_listed_and_the_daemon_s_told(folder: Path, tmp_path: Path) -> None:
    run("init")
    public = zmq.curve_keypair()[0].decode()
    said = run("add", "robot", "--public", public).output
    assert read_keys(folder).public in said
    assert read_keys(folder).clients == {public: "robot"}
    assert not (tmp_path / "robot.key_secret").exists()


@pytest.mark.usefixtures("folder")
def test_a_secret_key_has_no_place_where_only_a_public_one_is_given() -> None:
    run("init")
    asked = run("add", "robot", "--public", "x" * 40, "--out", "own")
    assert asked.exit_code == 2
    assert "without --public" in asked.output


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_is_a_failure(folder: Path) -> None:
    for arguments in (("list",), ("add", "robot"), ("remove", "robot")):
        result = run(*arguments)
        assert isinstance(result.exception, HearthError), arguments
    run("init")
    folder.chmod(0o755)
    result = run("list")
    assert f"chmod 700 {folder}" in str(result.exception)


@pytest.mark.usefixtures("folder")
def test_another_folder_is_a_flag(tmp_path: Path) -> None:
    assert run("init", "--keys", str(tmp_path / "others")).exit_code == 0
    assert read_keys(tmp_path / "others").clients == {}


@pytest.mark.parametrize(
    ("answer", "lines"),
    [
        (
            Reloaded([], []),
            ["nothing has changed: a reload reads the settings file, flags and variables stay"],
        ),
        (Reloaded(["hold_s", "log_level"], []), ["reloaded: hold_s, log_level"]),
        (
            Reloaded(["hold_s"], ["engine", "threads"]),
            ["reloaded: hold_s", "takes effect at a restart: engine, threads"],
        ),
    ],
)
def test_the_outcome_is_said(
    monkeypatch: pytest.MonkeyPatch, answer: Reloaded, lines: list[str]
) -> None:
    def ask(request: Reload, kind: type[Reloaded], socket: str) -> Reloaded:
        assert (request, kind, socket) == (Reload(), Reloaded, "/h.sock")
        return answer

    monkeypatch.setattr(module, "ask", ask)
    result = CliRunner().invoke(module.reload, ["--socket", "/h.sock"])
    assert (result.exit_code, result.output.splitlines()) == (0, lines)


def test_programs_get_it_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask", lambda *_: Reloaded(["hold_s"], ["threads"]))
    told = json.loads(CliRunner().invoke(module.reload, ["--json"]).output)
    assert (told["changed"], told["needs_restart"]) == (["hold_s"], ["threads"])


def test_what_is_refused_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> Reloaded:
        raise HearthError("invalid_value", "hearth.toml, clients: 0 is not allowed", "clients")

    monkeypatch.setattr(module, "ask", ask)
    result = CliRunner().invoke(module.reload, ["--socket", "/h.sock"])
    assert isinstance(result.exception, HearthError)
    assert result.exit_code == 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[AddAdapter]:
    found: list[AddAdapter] = []

    def ask(request: AddAdapter, *_: object) -> AdapterAdded:
        found.append(request)
        return AdapterAdded(request.name, 8, "hub/home", 9, "trained for [another]")

    monkeypatch.setattr(adapter_module, "ask", ask)
    return found


@pytest.mark.parametrize("name", ["spoken", "careful"])
def test_a_shipped_adapter_is_found_by_its_name(asked: list[AddAdapter], name: str) -> None:
    result = CliRunner().invoke(adapter_module.adapter, ["add", name, "--socket", "/s"])
    assert result.exit_code == 0
    assert (Path(asked[0].folder) / "adapter_config.json").is_file()
    assert "note trained for [another]" in result.stderr


def test_another_adapter_needs_its_folder(asked: list[AddAdapter]) -> None:
    result = CliRunner().invoke(adapter_module.adapter, ["add", "terse"])
    assert (result.exit_code, asked) == (2, [])
    assert "spoken and careful alone ship with Hearth" in result.stderr


def test_what_lies_there_comes_before_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shipped_model(Path("home")) == MODELS["home"]
    assert shipped_picture(Path("scene.jpg")) == PICTURE
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "scene.jpg").touch()
    assert shipped_model(Path("home")) == Path("home")
    assert shipped_picture(Path("scene.jpg")) == Path("scene.jpg")
    assert all((folder / "adapter_config.json").is_file() for folder in ADAPTERS.values())
    assert all((folder / "config.json").is_file() for folder in MODELS.values())
