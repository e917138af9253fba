import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from hearth.bench.__main__ import _COMMANDS, bench
from hearth.bench.report import (
    Record,
    Recorded,
    command_line,
    current_commit,
    figure,
    print_cases,
    print_fields,
    publish,
    read_record,
    record_option,
    rounded,
)
from hearth.runtime.errors import HearthError


class Figures(msgspec.Struct):
    rate: float
    notes: list[str]


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    publish({"a": Figures(1234.56789, ["x\ny"])}, lambda: None, as_json=True)
    assert capsys.readouterr().out == '{"a":{"rate":1234.57,"notes":["x\\ny"]}}\n'


def test_rounding_leaves_everything_else_alone() -> None:
    assert rounded([{"a": (1, 2.00000049)}, True, "x"]) == [{"a": [1, 2.0]}, True, "x"]


def test_a_table_off_a_terminal_is_plain_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"a_field_with_a_name_of_some_length_{index}" for index in range(5)]
    figures = msgspec.defstruct("Wide", [(name, float) for name in names])(*[1.0] * 5)
    print_cases("Title", " ".join(names), {"name": figures})
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert "\x1b" not in printed
    assert "…" not in printed


def test_a_table_of_cases_has_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    print_cases("Title", "rate notes", {"a/b": Figures(0.5, []), "c": Figures(1234.5, ["x"])})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [["case", "rate", "notes"], ["a/b", "0.5", "0"], ["c", "1234", "1"]]


def test_figures_are_for_people_or_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    found = Figures(1.23456, [])
    for as_json in (False, True):
        publish(found, lambda: print_fields("Title", found), as_json=as_json)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Title"
    assert [line.split() for line in lines[1:3]] == [["rate", "1.235"], ["notes", "[]"]]
    assert lines[3] == '{"rate":1.23456,"notes":[]}'


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (1.2345, "1.234"), (0.00012345, "0.0001234"), (123456.7, "123457"), (7, "7")],
)
def test_a_figure_has_four_digits_and_one_that_is_absent_is_a_dash(
    value: float | None, text: str
) -> None:
    assert figure(value) == text


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BENCH_COMMIT", "one")
    return tmp_path / "figures" / "gpu.json"


def read(file: Path) -> Recorded:
    found = read_record(file)
    assert found is not None
    return found


def graphs(file: Path) -> Record:
    return Record(file, ["hearth", "bench", "graphs"])


def test_runs_of_a_commit_are_merged_by_key(kept: Path) -> None:
    first = Record(kept, ["hearth", "bench", "decode", "--case", "0.6b/b1"])
    first.keep({"a": {"x": 1.23456789}, "b": 1})
    graphs(kept).keep({"b": Figures(2.0, [])})
    graphs(kept).keep({"b": 2})
    found = json.loads(kept.read_text())
    assert set(found) == {"date", "commit", "command", "figures"}
    assert found["figures"] == {"a": {"x": 1.23457}, "b": 2}
    assert found["command"] == "hearth bench decode --case 0.6b/b1 && hearth bench graphs"
    assert found["commit"] == "one"
    assert len(found["date"]) == 10


def test_figures_of_another_commit_keep_it(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs(kept).keep({"a": 1, "b": 1})
    day = read(kept).date
    for commit, figures in (("two", {"b": 2, "c": 2}), ("three", {"c": 3})):
        monkeypatch.setenv("BENCH_COMMIT", commit)
        Record(kept, ["hearth", "bench", commit]).keep(figures)
    found = read(kept)
    assert found.figures == {"a": 1, "b": 2, "c": 3}
    runs = [(found.run_of(key).commit, found.run_of(key).command) for key in "abc"]
    assert runs == [
        ("one", "hearth bench graphs"),
        ("two", "hearth bench two"),
        ("three", "hearth bench three"),
    ]
    assert found.run_of("a").date == day
    graphs(kept).keep({"a": 4, "b": 4})
    assert read(kept).earlier == []


def test_figures_of_another_day_keep_it(kept: Path) -> None:
    graphs(kept).keep({"a": 1})
    kept.write_text(kept.read_text().replace(read(kept).date, "2026-01-01"))
    graphs(kept).keep({"b": 2})
    assert read(kept).run_of("a").date == "2026-01-01" < read(kept).run_of("b").date


def test_a_command_records_under_its_name_where_a_file_is_given(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Record] = []

    @click.command("graphs")
    @record_option
    def command(record: Record) -> None:
        given.append(record)

    monkeypatch.setattr("sys.argv", ["hearth", "bench", "graphs", "--batches", "2"])
    for words in ([], ["--record", str(kept)]):
        command.main(words, prog_name="hearth bench graphs", standalone_mode=False)
    for record in given:
        assert not kept.exists()
        record.keep({"a": 1})
    found = json.loads(kept.read_text())
    assert found["command"] == "hearth bench graphs --batches 2"
    assert found["figures"] == {"a": 1}


def test_another_file_is_refused_before_anything_is_measured(kept: Path) -> None:
    kept.parent.mkdir()
    kept.write_text('{"something": "else"}')
    with pytest.raises(HearthError, match="holds no figures"):
        graphs(kept)
    assert kept.read_text() == '{"something": "else"}'


def test_without_a_repository_a_commit_must_be_given(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    monkeypatch.setattr("hearth.bench.report.subprocess.run", fail)
    with pytest.raises(HearthError, match="set \\$BENCH_COMMIT"):
        graphs(kept)
    assert Record(None, []).file is None


def test_the_commit_is_that_of_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    done = subprocess.CompletedProcess([], 0, "abc123\n")
    monkeypatch.setattr("hearth.bench.report.subprocess.run", lambda *_, **__: done)
    assert current_commit() == "abc123"


def test_the_command_line_is_kept_but_for_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    for record in (["--record", "file"], ["--record=file"]):
        monkeypatch.setattr("sys.argv", ["x", "bench", "decode", *record, "--device", "cuda"])
        command = ["hearth", "bench", "decode", "--device", "cuda"]
        assert command_line("hearth bench decode") == command


FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.mark.parametrize("name", ["h200-step", "h200-shared", "h200-ort-spec", "shared"])
def test_figures_of_engines_name_their_type(name: str) -> None:
    found = json.loads((FIGURES / f"{name}.json").read_text("utf-8"))["figures"]
    assert {one.get("dtype") for one in found.values()} <= {"float32", "float16", "bfloat16"}


NAMES = (
    "decode",
    "overhead",
    "load",
    "memory",
    "spec",
    "prefix",
    "lora",
    "structured",
    "vision",
    "clients",
)


def test_every_command_is_where_the_group_looks_for_it() -> None:
    assert tuple(_COMMANDS) == NAMES
    for name, lazy in _COMMANDS.items():
        module, _, attribute = lazy.target.partition(":")
        import_module(module)
        assert getattr(sys.modules[module], attribute).name == name


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, f"make system ROW={name}") for name in ("faults", "overload", "soak")),
        *((name, f"python -m tools.{name}") for name in ("widths", "graphs")),
    ],
)
def test_what_moved_names_its_new_place(name: str, place: str) -> None:
    result = CliRunner().invoke(bench, [name, "--json"])
    assert result.exit_code == 2
    assert f"it is `{place}` in the repository" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("overhead", "--step-ms", "nan"),
        ("overhead", "--step-ms", "60001"),
        ("spec", "--tree", "4,3,160"),
    ],
)
def test_what_nothing_takes_is_wrong_usage(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in ("overhead.given_or_toy", "spec.command.engine_folder"):
        monkeypatch.setattr(f"hearth.bench.{work}", pytest.fail)
    assert CliRunner().invoke(bench, arguments).exit_code == 2
