import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hearth.daemon.cli import main
from hearth.daemon.cli.errors import Failure
from hearth.daemon.demo import show as demo
from hearth.daemon.own_daemon import own_daemon
from hearth.daemon.shipped import VISION
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from tests.daemon.conftest import REFERENCE


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
