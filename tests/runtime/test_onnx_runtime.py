"""Libraries: what is imported, and the commands that install what is missing."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.onnx_runtime import CUDA_PROVIDER, check_provider, check_version
from hearth.runtime.packages import (
    VERSION,
    WHEELS,
    Need,
    install_wheels,
    pip_install,
    version_numbers,
)
from tests.references import reference_folder
from tests.runtime.conftest import EngineFolders
from tests.test_install import PROJECT

WITHOUT = """
import sys
from importlib import metadata

class NoEngine:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            raise ModuleNotFoundError("No module named 'onnxruntime'", name=name)

def absent(name):
    raise metadata.PackageNotFoundError(name)

sys.meta_path.insert(0, NoEngine())
metadata.version = absent
from hearth.daemon.cli import main
main()
"""


@pytest.mark.parametrize("version", ["1.23.2", "1.9.0", "0.24.1"])
def test_an_older_library_is_told_what_to_do_with_a_native_engine(version: str) -> None:
    check_version("classic", "cpu", version)
    with pytest.raises(HearthError, match="classic dialect") as caught:
        check_version("native", "cpu", version)
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "dialect")


@pytest.mark.parametrize("version", ["1.24.0", "1.31.1", "2.0.0", "1.31.0.dev1"])
def test_newer_libraries_serve_both_dialects(version: str) -> None:
    check_version("native", "cpu", version)


@pytest.mark.parametrize("version", ["1.23.0", "1.26.0", "1.29.0"])
@pytest.mark.parametrize("dialect", ["native", "classic"])
def test_a_cuda_provider_without_what_a_graph_needs_is_refused(dialect: str, version: str) -> None:
    with pytest.raises(HearthError, match=rf"1\.30 or newer, this is {version}") as caught:
        check_version(dialect, "cuda", version)
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "device")
    check_version(dialect, "cuda", "1.30.0")


def test_a_build_without_cuda_is_told_what_has_it() -> None:
    check_provider(SimpleNamespace(get_available_providers=lambda: [CUDA_PROVIDER]))
    plain = SimpleNamespace(__version__="1.31.1", get_available_providers=list)
    with pytest.raises(HearthError, match=r"\(1\.31\.1\) has no CUDA: .*onnxruntime-gpu>="):
        check_provider(plain)


@pytest.mark.parametrize("command", ["check", "generate", "export"])
def test_without_an_engine_library_one_line_says_what_to_install(
    command: str, tmp_path: Path, engine_folders: EngineFolders
) -> None:
    folder = engine_folders("qwen3", "classic")
    arguments = {
        "check": ["--engine", str(folder)],
        "generate": [str(folder), "--ids", "1,2"],
        "export": [str(reference_folder("qwen3")), str(tmp_path / "engine")],
    }[command]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("hearth: ")
    assert done.stderr.count("\n") == 1
    assert "there is no engine library" in done.stderr
    assert f"{sys.executable} -m pip install 'onnxruntime>=1.23'" in done.stderr


ROOT = Path(__file__).parents[2]
OWN = re.compile(r"hearthd|hearth[-_]client")
FOR_WORK_ON_HEARTH = {"bench", "dev", "reference"}
ROOMS = ("actors", "bench", "daemon", "runtime", "clients/python/hearth_client")
CODE = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("clients/python/*.md"))
    if path.name != "CHANGELOG.md" and ".venv" not in path.parts
)


def asked_for(text: str) -> list[str]:
    """The words of a text's commands by which pip would ask a registry for Hearth."""
    commands = re.findall(r"pip install[^\n#]*", text, re.IGNORECASE)
    words = [word for command in commands for word in re.split(r"[\s'\"`]+", command)]
    return [word for word in words if OWN.match(word)]


def test_every_package_of_an_extra_is_known_and_no_other() -> None:
    extras = PROJECT["optional-dependencies"]
    named = {line for extra in extras.keys() - FOR_WORK_ON_HEARTH for line in extras[extra]}
    known = {word for need in get_args(Need) for word in pip_install(need).split()[4:]}
    assert {line.partition(";")[0] for line in named} == {word.strip("'") for word in known}


def test_a_command_is_that_of_the_environment_that_runs() -> None:
    command = pip_install("cuda12")
    assert command.startswith(f"{sys.executable} -m pip install ")
    assert "'cuda-bindings==12.9.*'" in command


def test_hearth_comes_by_paths_alone() -> None:
    command = install_wheels("/opt/hearth/bin/pip", "cpu")
    assert command.startswith("/opt/hearth/bin/pip install 'dist/hearthd-")
    assert not asked_for(command)
    assert asked_for("pip install --find-links dist 'hearthd[cpu]'") == ["hearthd[cpu]"]
    assert all(f"-{VERSION}-py3-none-any.whl" in wheel for wheel in WHEELS)


def test_no_message_asks_a_registry_for_hearth() -> None:
    texts = {path: path.read_text() for path in CODE}
    assert not [path for path, text in texts.items() if re.search(r"[\"' ]hearthd\[", text)]
    assert not [path for path, text in texts.items() if asked_for(text)]


def test_no_page_asks_a_registry_for_hearth() -> None:
    found = {path.name: asked_for(path.read_text()) for path in PAGES}
    assert {name: words for name, words in found.items() if words} == {}


def test_pages_name_the_wheels_of_this_version() -> None:
    named = {
        wheel
        for path in PAGES
        for wheel in re.findall(r"hearth(?:d|_client)-[\w.-]+\.whl", path.read_text())
    }
    assert named == set(WHEELS)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("10.16.1.11", (10, 16, 1)),
        ("10.0.0b6", (10, 0, 0)),
        ("1.31.1", (1, 31, 1)),
        ("1.24.dev20250101+cu12", (1, 24, 20250101)),
    ],
)
def test_the_numbers_of_a_version(text: str, numbers: tuple[int, ...]) -> None:
    assert version_numbers(text) == numbers


def test_the_package_has_this_version() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    stated = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert stated is None or stated[1] == VERSION
