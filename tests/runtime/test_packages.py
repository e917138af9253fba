"""Commands that install what is missing, in messages and pages, name no wheel of Hearth's."""

import re
import sys
from pathlib import Path
from typing import get_args

from hearth.runtime.packages import VERSION, WHEELS, Need, install_wheels, pip_install
from tests.test_install import PROJECT

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
