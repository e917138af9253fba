import subprocess
import sys

import pytest
from rich.table import Table

from hearth.daemon.cli.console import Lines, err, out, printable, progress_bar, show, size, table


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.0 GiB")],
)
def test_sizes(count: int, words: str) -> None:
    assert size(count) == words


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\rc\n\td\x9b") == "a\ufffd[2Jb\ufffdc\n\td\ufffd"
    assert printable("näh 你好 🙂") == "näh 你好 🙂"


def test_a_table_is_plain_and_shows_markup_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    out().print(table([("engine", "/a[b]/c"), ("batch", "8")]))
    assert capsys.readouterr().out == "engine  /a[b]/c\nbatch   8\n", "and nothing behind it"


def test_progress_goes_to_standard_error_and_shows_each_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bar() as progress:
        progress("weights", 5, 10)
        progress("weights", 10, 10)
        progress("digests", 1, 1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "weights" in captured.err
    assert "digests" in captured.err
    assert "\x1b" not in captured.err


def test_no_progress_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar():
        pass
    err().print("x")
    assert capsys.readouterr().err.strip() == "x"


def shown(parts: list[str], width: int) -> str:
    lines = Lines(width)
    return "".join(map(lines.feed, parts)) + lines.rest()


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("un forgiving sea", 8, ["un", "forgivin", "g sea"]),
        ("the cat sat", 7, ["the cat", "sat"]),
        ("  indented", 20, ["  indented"]),
        ("one\n\n  two", 20, ["one", "", "  two"]),
        ("\u5bb6\u306e\u706f", 4, ["\u5bb6\u306e", "\u706f"]),
        ("", 4, [""]),
    ],
)
def test_lines_break_between_words_however_the_text_arrives(
    text: str, width: int, lines: list[str]
) -> None:
    assert shown([text], width).split("\n") == lines
    assert shown(list(text), width).split("\n") == lines


def test_a_word_waits_for_its_end() -> None:
    lines = Lines(80)
    assert [lines.feed(part) for part in ("Hel", "lo wor", "ld", " ")] == [
        "",
        "Hello",
        "",
        " world",
    ]


def test_off_a_terminal_no_line_ends_in_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    grid = Table(box=None, expand=True)
    grid.add_column("name", ratio=1)
    grid.add_row("a")
    show(grid)
    assert capsys.readouterr().out.rstrip("\n").split("\n") == [" name", " a"]


def test_who_reads_no_further_does_not_make_it_a_failure() -> None:
    code = (
        "from hearth.daemon.cli.console import out, table\n"
        "from hearth.daemon.cli.errors import run_and_exit\n"
        "run_and_exit(lambda: [out().print(table([('a', 'b' * 99)] * 99)) for _ in range(99)])"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.read(1)
        program.stdout.close()
        assert program.wait(20) == 141
