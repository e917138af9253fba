import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.table import Table

import hearth.daemon.cli
from hearth.daemon.cli import LazyCommand, LazyGroup
from hearth.daemon.cli.console import Lines, err, out, printable, progress_bar, show, size, table
from hearth.daemon.cli.errors import keep_to_this_machine
from hearth.runtime.errors import HearthError


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hearth", *arguments])
    with pytest.raises(SystemExit) as caught:
        hearth.daemon.cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def raise_it(**_options: object) -> None:
        raise error

    monkeypatch.setattr(hearth.daemon.cli.cli, "main", raise_it)
    return run(monkeypatch)


def test_help_lists_every_command_and_imports_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [name for name in sys.modules if name.startswith("hearth.daemon.cli.")]:
        if module.rpartition(".")[2] in {"serve", "chat", "generate", "check"}:
            monkeypatch.delitem(sys.modules, module)
    assert run(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    for command in ("serve", "chat", "generate", "export", "check", "status", "bench"):
        assert f"  {command} " in text
        assert f"hearth.daemon.cli.{command}" not in sys.modules or command in {"export", "status"}
    assert "hearth chat" in text


def test_an_unknown_command_is_a_usage_error_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "sreve") == 2
    assert capsys.readouterr().err == (
        "hearth: there is no command 'sreve' (nearest: serve): see hearth --help\n"
    )


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (HearthError("engine_missing", "no engine at x", "engine"), 1, "no engine at x (eng"),
        (click.ClickException("two\nlines"), 1, "two lines"),
        (click.UsageError("what?"), 2, "what?"),
        (PermissionError(errno.EACCES, "Permission denied", "x/y"), 1, "x/y: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device"),
        (TimeoutError("no answer"), 1, "no answer"),
    ],
)
def test_a_failure_is_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    assert fails_with(monkeypatch, error) == code
    text = capsys.readouterr().err
    assert text.startswith(f"hearth: {line}")
    assert text.count("\n") == 1


def test_the_journal_is_told_that_a_failure_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w+") as file:
        found = os.fstat(file.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        monkeypatch.setattr(sys, "stderr", file)
        fails_with(monkeypatch, click.ClickException("no"))
        file.seek(0)
        assert file.read() == "<3>hearth: no\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_an_interruption_ends_silently_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    assert fails_with(monkeypatch, error) == 130
    assert capsys.readouterr().err == ""


def test_what_nobody_foresaw_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_it(**_options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(hearth.daemon.cli.cli, "main", raise_it)
    with pytest.raises(ZeroDivisionError):
        hearth.daemon.cli.main()


@pytest.mark.parametrize("command", [(), ("bench",)])
def test_without_a_command_the_help_is_shown_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert run(monkeypatch, *command) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("Usage: hearth")
    assert run(monkeypatch, *command, "--help") == 0
    assert capsys.readouterr().out == shown.err


def test_a_closed_pipe_needs_no_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails_with(monkeypatch, BrokenPipeError(errno.EPIPE, "Broken pipe")) == 141
    assert capsys.readouterr().err == ""


def test_no_library_leaves_anything_in_the_home_of_the_user(
    tiny_engine: Path, tmp_path: Path
) -> None:
    environ = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environ.pop("ORT_DISABLE_TELEMETRY", None)
    arguments = ("generate", str(tiny_engine), "--ids", "1,2", "--max-tokens", "2")
    subprocess.run([sys.executable, "-m", "hearth.daemon.cli", *arguments], env=environ, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_the_work_has_ignored_stays_ignored_to_the_end() -> None:
    code = """
import atexit, os, signal
from hearth.daemon.cli.errors import run_and_exit

atexit.register(os.kill, os.getpid(), signal.SIGTERM)
run_and_exit(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN) and 0)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sigterm_undoes_what_was_begun_and_ends_the_program_as_it_does(tmp_path: Path) -> None:
    code = f"""
import pathlib, time
from hearth.daemon.cli.errors import run_and_exit

def work():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        pathlib.Path({str(tmp_path / "undone")!r}).touch()

run_and_exit(work)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"begun\n"
        program.terminate()
        assert program.wait(30) == -signal.SIGTERM
    assert (tmp_path / "undone").exists()


def test_what_an_encoding_lacks_is_a_question_mark_and_no_traceback() -> None:
    run = "run_and_exit(lambda: print('caf\\xe9 \\u2588'))"
    code = f"from hearth.daemon.cli.errors import run_and_exit; {run}"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    program = [sys.executable, "-c", code]
    done = subprocess.run(program, capture_output=True, check=False, env=environ)
    assert (done.returncode, done.stdout) == (0, b"caf? ?\n"), done.stderr


def test_onnx_runtime_is_told_to_report_nothing() -> None:
    environ = {"HOME": "/home/one"}
    keep_to_this_machine(environ)
    assert environ == {"HOME": "/home/one", "ORT_DISABLE_TELEMETRY": "1"}


def test_what_the_operator_has_decided_stays() -> None:
    environ = {"ORT_DISABLE_TELEMETRY": "0"}
    keep_to_this_machine(environ)
    assert environ == {"ORT_DISABLE_TELEMETRY": "0"}


@pytest.fixture
def group() -> LazyGroup:
    commands = {
        "status": LazyCommand("hearth.daemon.cli.status:status", "Show it."),
        "broken": LazyCommand("daemon.no_such_module:x", "Never imported by the help."),
        "wrong": LazyCommand("hearth.daemon.cli.errors:FAILED", "Not a command."),
    }
    return LazyGroup(name="group", commands_by_name=commands, elsewhere={"ps": "status shows it"})


def test_the_help_comes_from_the_table(group: LazyGroup) -> None:
    text = CliRunner().invoke(group, ["--help"]).output
    assert text.index("status  Show it.") < text.index("broken  Never imported by the help.")


def test_a_command_is_imported_when_it_is_used(group: LazyGroup) -> None:
    result = CliRunner().invoke(group, ["status", "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output


def test_a_table_entry_that_is_no_command_is_a_mistake(group: LazyGroup) -> None:
    with pytest.raises(TypeError, match="is not a command"):
        group.get_command(click.Context(group), "wrong")


def test_an_unknown_name_without_a_near_one_is_a_usage_error(group: LazyGroup) -> None:
    result = CliRunner().invoke(group, ["zzz"])
    assert result.exit_code == 2
    assert "there is no command 'zzz'" in result.output
    assert "nearest" not in result.output


def test_a_name_that_other_tools_have_is_explained(group: LazyGroup) -> None:
    result = CliRunner().invoke(group, ["ps"])
    assert result.exit_code == 2
    assert "there is no command 'ps': status shows it" in result.output


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
