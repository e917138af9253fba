import json
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner, Result

from hearth.daemon.cli.keys import keys
from hearth.daemon.door.keys import read_keys
from hearth.runtime.errors import HearthError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEARTH_KEYS", str(tmp_path / "keys"))
    return tmp_path / "keys"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(keys, arguments)


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


def test_a_key_made_elsewhere_is_listed_and_the_daemon_s_told(folder: Path, tmp_path: Path) -> None:
    run("init")
    public = zmq.curve_keypair()[0].decode()
    said = run("add", "robot", "--public", public).output
    assert read_keys(folder).public in said
    assert read_keys(folder).clients == {public: "robot"}
    assert not (tmp_path / "robot.key_secret").exists()


def test_a_secret_key_has_no_place_where_only_a_public_one_is_given() -> None:
    run("init")
    asked = run("add", "robot", "--public", "x" * 40, "--out", "own")
    assert asked.exit_code == 2
    assert "without --public" in asked.output


def test_what_cannot_be_is_a_failure(folder: Path) -> None:
    for arguments in (("list",), ("add", "robot"), ("remove", "robot")):
        result = run(*arguments)
        assert isinstance(result.exception, HearthError), arguments
    run("init")
    folder.chmod(0o755)
    result = run("list")
    assert f"chmod 700 {folder}" in str(result.exception)


def test_another_folder_is_a_flag(tmp_path: Path) -> None:
    assert run("init", "--keys", str(tmp_path / "others")).exit_code == 0
    assert read_keys(tmp_path / "others").clients == {}
