import msgspec
import pytest

from bench.report import (
    figure,
    print_fields,
    print_json,
    print_table,
    publish,
    rounded,
)


class Figures(msgspec.Struct):
    rate: float
    notes: list[str]


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": Figures(1234.56789, ["x\ny"])})
    assert capsys.readouterr().out == '{"a":{"rate":1234.57,"notes":["x\\ny"]}}\n'


def test_rounding_leaves_everything_else_alone() -> None:
    assert rounded([{"a": (1, 2.00000049)}, True, "x"]) == [{"a": [1, 2.0]}, True, "x"]


def test_a_table_off_a_terminal_is_plain_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [f"column number {index}" for index in range(9)]
    print_table("Title", columns, [["name", *(["1.00"] * 8)]])
    printed = capsys.readouterr().out
    assert all(column in printed for column in columns)
    assert "\x1b" not in printed
    assert "…" not in printed


def test_figures_are_for_people_or_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    found = Figures(1.23456, [])
    for as_json in (False, True):
        publish(found, lambda: print_fields("Title", found, ".3f"), as_json=as_json)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Title"
    assert [line.split() for line in lines[2:4]] == [["rate", "1.235"], ["notes", "[]"]]
    assert lines[4] == '{"rate":1.23456,"notes":[]}'


def test_a_figure_that_is_absent_is_a_dash() -> None:
    assert (figure(None), figure(1.234), figure(0.5, ".1f")) == ("-", "1.23", "0.5")
