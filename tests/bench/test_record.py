import json
import subprocess
from pathlib import Path

import pytest

from bench.record import command_line, current_commit, keep_figures, write_record
from runtime.errors import HearthError


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BENCH_COMMIT", "one")
    return tmp_path / "figures" / "gpu.json"


def test_runs_of_a_commit_are_merged_by_key(kept: Path) -> None:
    write_record(kept, {"a": {"x": 1.23456789}, "b": 1}, ["bench", "decode", "--case", "0.6b/b1"])
    write_record(kept, {"b": 2}, ["bench", "graphs"])
    write_record(kept, {"b": 2}, ["bench", "graphs"])
    found = json.loads(kept.read_text())
    assert set(found) == {"date", "commit", "command", "figures"}
    assert found["figures"] == {"a": {"x": 1.23457}, "b": 2}
    assert found["command"] == "hearth bench decode --case 0.6b/b1 && hearth bench graphs"
    assert found["commit"] == "one"
    assert len(found["date"]) == 10


def test_figures_of_another_commit_make_room(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(kept, {"a": 1}, ["bench", "graphs"])
    monkeypatch.setenv("BENCH_COMMIT", "two")
    write_record(kept, {"b": 2}, ["bench", "memory"])
    found = json.loads(kept.read_text())
    assert (found["commit"], found["command"], found["figures"]) == (
        "two",
        "hearth bench memory",
        {"b": 2},
    )


def test_a_command_records_under_its_name_where_a_file_is_given(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["hearth", "bench", "graphs", "--batches", "2"])
    keep_figures(None, {"a": 1}, "graphs")
    assert not kept.exists()
    keep_figures(kept, {"a": 1}, "graphs")
    record = json.loads(kept.read_text())
    assert record["command"] == "hearth bench graphs --batches 2"
    assert record["figures"] == {"a": 1}


def test_another_file_is_not_overwritten(kept: Path) -> None:
    kept.parent.mkdir()
    kept.write_text('{"something": "else"}')
    with pytest.raises(HearthError, match="holds no figures"):
        write_record(kept, {}, ["bench", "graphs"])
    assert kept.read_text() == '{"something": "else"}'


def test_without_a_repository_a_commit_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    monkeypatch.setattr("bench.record.subprocess.run", fail)
    with pytest.raises(HearthError, match="set \\$BENCH_COMMIT"):
        current_commit()


def test_the_command_line_is_kept_but_for_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    for record in (["--record", "file"], ["--record=file"]):
        monkeypatch.setattr("sys.argv", ["x", "bench", "decode", *record, "--device", "cuda"])
        assert command_line("decode") == ["bench", "decode", "--device", "cuda"]
        assert command_line("graphs") == ["bench", "graphs"]
