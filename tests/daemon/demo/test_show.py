import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from hearth.daemon.cli import main
from hearth.daemon.cli.errors import Failure
from hearth.daemon.demo import show as demo
from hearth.daemon.demo.show import Reply, half_blocks, show, show_picture
from hearth.daemon.own_daemon import own_daemon
from hearth.daemon.shipped import VISION
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from tests.conftest import REFERENCE


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine in place of the shipped one, and a home that fits into it."""
    folder = tmp_path / "engine"
    export_model(REFERENCE, folder, ExportOptions(capacity=512))
    monkeypatch.setattr(demo, "engine_folder", lambda *_unused: folder)
    monkeypatch.setattr(demo, "vision_engine_folder", lambda *_unused: folder)
    monkeypatch.setattr(demo, "ask_about_the_picture", lambda *_unused: None)
    monkeypatch.setattr(demo, "EXAMPLE_HOME", "home")
    return folder


@pytest.mark.parametrize("words", ["The blue robot.", '{"action":"turn_on","device":"fan"}'])
def test_the_vision_variant_sees_what_is_in_the_picture(seen: str, words: str) -> None:
    assert words in seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the demo prints about its picture, answered by the variant that ships."""
    folder = tmp_path_factory.mktemp("seeing") / "engine"
    export_model(VISION, folder, ExportOptions())
    stream = io.StringIO()
    with own_daemon(folder) as daemon:
        demo.ask_about_the_picture(Console(file=stream, width=200), daemon.socket)
        daemon.stop()
    return stream.getvalue()


@pytest.mark.usefixtures("engine")
def test_two_questions_get_their_replies_and_the_daemon_stops_cleanly() -> None:
    stream = io.StringIO()
    demo.run_demo(Console(file=stream, width=200))
    text = stream.getvalue()
    order = [
        text.index(words)
        for words in ("ready in", "1 asks:", "2 asks:", "1 done:", "2 done:", "stopped cleanly")
    ]
    assert order == sorted(order)
    assert text.count("first after") == 2


def test_a_refused_question_is_a_failure(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "EXAMPLE_HOME", "far too long " * 100)
    with pytest.raises(Failure, match="a question got no reply: the prompt has"):
        demo.run_demo(Console(file=io.StringIO()))
    assert engine.is_dir()


def test_the_exit_code_tells_of_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_unused: object) -> None:
        raise HearthError("engine_missing", "no model", "engine")

    monkeypatch.setattr(demo, "engine_folder", fail)
    monkeypatch.setattr(sys, "argv", ["hearth", "demo"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "hearth: no model (engine_missing, engine)\n"


def test_the_program_in_the_readme_runs_as_it_is_printed(engine: Path) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    program = readme.split("```python\n")[1].split("```")[0]
    with own_daemon(engine) as daemon:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "HEARTH_SOCKET": str(daemon.socket)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.stderr == ""
    assert re.search(r"(length|stop) \d+\n$", done.stdout)


def screen(*, terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=100, highlight=False), stream


def two_replies() -> list[Reply]:
    replies = [Reply("first question"), Reply("second question")]
    replies[0].add("one ", 1)
    replies[1].add("uno ", 1)
    replies[0].add("two", 2)
    return replies


def test_figures_count_tokens() -> None:
    reply = Reply("q")
    assert reply.figures() == "waiting"
    reply.add("a", 1)
    assert reply.figures().startswith("1 tokens, first after ")
    assert "tokens/s" not in reply.figures()


def test_off_a_terminal_lines_say_whose_they_are() -> None:
    console, stream = screen(terminal=False)
    show(console, two_replies(), lambda: True)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "1 asks: first question"
    assert lines[2].startswith("1 ")
    assert lines[2].endswith("  one two")
    assert lines[3].endswith("  uno ")
    assert lines[4].startswith("1 done: 3 tokens")


def test_on_a_terminal_the_replies_stand_side_by_side() -> None:
    console, stream = screen(terminal=True)
    show(console, two_replies(), lambda: True)
    assert any("one two" in line and "uno" in line for line in stream.getvalue().splitlines())


def test_showing_goes_on_until_all_are_finished() -> None:
    console, stream = screen(terminal=False)
    replies = [Reply("q")]
    answers = iter([False, False, True])

    def finished() -> bool:
        replies[0].add("x" * 30, 1)
        return next(answers)

    show(console, replies, finished)
    assert stream.getvalue().count("x") == 90


def test_control_characters_of_the_model_are_not_shown() -> None:
    reply = Reply("q")
    reply.add("\x1b[2J", 1)
    assert reply.text == "\ufffd[2J"


def _flag(folder: Path) -> Path:
    image = Image.new("RGB", (8, 8), (255, 0, 0))
    image.paste((0, 0, 255), (0, 4, 8, 8))
    path = folder / "flag.png"
    image.save(path)
    return path


def test_a_character_shows_one_pixel_above_another(tmp_path: Path) -> None:
    text = half_blocks(_flag(tmp_path), 2)
    assert text.plain == "▀▀\n"
    style = text.spans[0].style
    assert str(style) == "#ff0000 on #0000ff"


def test_without_colours_the_file_is_named(tmp_path: Path) -> None:
    for system in (None, "truecolor"):
        stream = io.StringIO()
        show_picture(
            Console(file=stream, color_system=system, force_terminal=bool(system)), _flag(tmp_path)
        )
        assert ("▀" in stream.getvalue()) == bool(system)
        assert (str(_flag(tmp_path)) in stream.getvalue().replace("\n", "")) != bool(system)
