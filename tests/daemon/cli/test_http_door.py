import pytest
from click.testing import CliRunner

from hearth.daemon.cli import cli, http_door


def test_it_is_the_other_distributions_command(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _path, words: ran.append(words[1:]))
    for words in (["--port", "0"], ["--help"], ["add", "kitchen"]):
        assert CliRunner().invoke(cli, ["http", *words]).exit_code == 0
        assert ran.pop() == ["-m", "hearth_http", *words]
    monkeypatch.setattr(http_door, "find_spec", lambda _name: None)
    told = CliRunner().invoke(cli, ["http"])
    assert (told.exit_code, ran) == (1, [])
    assert "hearth-http is not installed here" in told.output
