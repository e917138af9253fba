from itertools import pairwise
from pathlib import Path

import pytest

from tests.tools.trees import repository, written
from tools.house import (
    Figure,
    count_docstrings,
    count_files,
    count_hops,
    count_imports,
    count_long_functions,
    count_messages,
    count_requests,
    count_settings,
    count_small_files,
)
from tools.source_tree import SourceTree, read_floors

_PAGE = "docs/architecture.md"
_KEEPER = """
class Keeper:
    size: int

    def __init__(self):
        self._open = {}
        self._left, self._right = {}, other._there
"""
_HOPS = """
import json
from hearth import FRAMES
figures = {"frames": FRAMES, "calls": 83, "files": 24}
print(json.dumps({"figures": figures, "lists": {"frames": ["run"], "step": ["step"]}}))
"""
_HELP = """
def main():
    print("Usage: hearth\\n\\nOptions:\\n  --config FILE  x\\n  -h, --help  x\\n")
    print("Settings:\\n  --engine TEXT  One that\\n                 --is long.\\n")
    print("Settings for benches:\\n  -s, --step-ms X  x\\n  --spin / --no-spin  x")
"""


def found_in(*figures: Figure) -> dict[str, int | None]:
    return {figure.name: figure.value for figure in figures}


def test_files_and_lines(tmp_path: Path) -> None:
    files = {
        "daemon/a.py": "x = 1\n\n# why\n",
        "daemon/__init__.py": "",
        "tools/b.py": "x = 1\n",
        "tests/test_a.py": "x = 1\ny = 2\n",
        "tests/__init__.py": "",
        "runtime/wide.cu": "\n" * 7,
    }
    assert found_in(*count_files(written(tmp_path, files))) == {
        "source_files": 2,
        "package_files": 1,
        "package_lines": 3,
        "largest_file_lines": 7,
        "test_files": 2,
        "test_lines": 2,
    }


def test_small_files_with_one_reader(tmp_path: Path) -> None:
    files = {
        "daemon/reader.py": "import daemon.one, daemon.two, daemon.long, daemon.far.away\n",
        "daemon/other.py": "import daemon.two\n",
        "daemon/one.py": "x = 1\n" * 100,
        "daemon/two.py": "x = 1\n",
        "daemon/long.py": "x = 1\n" * 101,
        "daemon/far/away.py": "x = 1\n",
        "tests/test_one.py": "import daemon.one\n",
    }
    counted = count_small_files(written(tmp_path, files))
    assert counted.found == ["daemon/one.py 100 <- daemon/reader.py"]


def test_long_functions(tmp_path: Path) -> None:
    text = "def short():\n" + "    x = 1\n" * 59 + "async def long():\n" + "    x = 1\n" * 60
    counted = count_long_functions(written(tmp_path, {"daemon/a.py": text}))
    assert counted.found == ["daemon/a.py:61 long 61"]


def requests_of(folder: Path, page: str) -> dict[str, int | None]:
    tree = written(folder, {_PAGE: page, "daemon/keeper.py": _KEEPER})
    return found_in(*count_requests(tree))


def test_classes_and_tables_of_a_request(tmp_path: Path) -> None:
    page = (
        "```request classes in\ndaemon.keeper.Keeper\n```\n"
        "```request tables\ndaemon.keeper.Keeper._open _left _right\n"
        "hearth.daemon.keeper.Keeper.size\n```\n"
    )
    assert requests_of(tmp_path, page) == {
        "request_classes_in": 1,
        "request_classes_back": None,
        "request_tables": 2,
    }


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("classes in", "daemon.keeper.Other"),
        ("classes back", "daemon.gone.Keeper"),
        ("tables", "daemon.keeper.Keeper._there"),
    ],
)
def test_a_name_that_is_not_there_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    with pytest.raises(ValueError, match="not there"):
        requests_of(tmp_path, f"```request {kind}\n{name}\n```\n")


def test_the_page_names_what_the_code_has() -> None:
    assert all(figure.value for figure in count_requests(repository()))


def test_messages_are_encoded_by_position(tmp_path: Path) -> None:
    files = {
        "actors/base.py": "class Base(msgspec.Struct, array_like=True): ...\n",
        "actors/above.py": "class Step(FromExecutor, tag='s'): ...\n",
        "actors/between.py": "class FromExecutor(base.Base): ...\n",
        "actors/settings.py": "class Settings(msgspec.Struct, frozen=True): ...\n",
        "runtime/request.py": "class Row(msgspec.Struct, array_like=True): ...\n",
    }
    counted = count_messages(written(tmp_path, files))
    assert counted.found == [
        "actors.above.Step",
        "actors.base.Base",
        "actors.between.FromExecutor",
    ]


def test_settings_are_the_options_that_help_shows(tmp_path: Path) -> None:
    script = '[project.scripts]\nhearth = "cli:main"\n'
    tree = written(tmp_path, {"pyproject.toml": script, "cli.py": _HELP})
    assert count_settings(tree).found == ["--engine", "--step-ms", "--spin"]


def test_hops_are_counted_by_the_program_of_the_tree(tmp_path: Path) -> None:
    names = ("frames_to_launch", "calls_per_step", "files_per_step")
    assert found_in(*count_hops(SourceTree(tmp_path, []))) == dict.fromkeys(names)
    tree = written(tmp_path, {"tools/hops.py": _HOPS, "src/hearth/__init__.py": "FRAMES = 7"})
    assert [figure.value for figure in count_hops(tree)] == [7, 83, 24]


def test_imports_up_and_circles(tmp_path: Path) -> None:
    files = {
        _PAGE: "```floors rooms\ndaemon\n```\n```floors daemon\na\nb\n```\n",
        "daemon/a.py": "import daemon.b\n",
        "daemon/b.py": "import daemon.a\n",
    }
    up, circles = count_imports(written(tmp_path, files))
    assert up.found == ["daemon.b -> daemon.a"]
    assert circles.value == 1


def test_docstrings_with_forbidden_openings(tmp_path: Path) -> None:
    text = '"""Whose it is."""\nx = 1\n"""Whatever."""\ndef f():\n    """Give it."""\n'
    attribute = 'y = 1\n"""What it is."""\nz = "That of z"\n'
    counted = count_docstrings(written(tmp_path, {"daemon/a.py": text + attribute}))
    assert counted.found == ["daemon/a.py:1 Whose it is.", "daemon/a.py:7 What it is."]


def test_what_counts_as_source_package_and_test(tmp_path: Path) -> None:
    paths = [
        "clients/python/hearth_client/client.py",
        "daemon/service.py",
        "docs/draw.py",
        "models/train.py",
        "tests/system/faults.py",
        "tools/house.py",
    ]
    files = dict.fromkeys(paths, "x = 1\n")
    tree = written(tmp_path, {**files, "daemon/__init__.py": "", "tests/__init__.py": ""})
    assert [str(file.path) for file in tree.sources] == [paths[0], paths[1], paths[3], paths[5]]
    assert [str(file.path) for file in tree.package] == paths[:2]
    assert [str(file.path) for file in tree.tests] == ["tests/__init__.py", paths[4]]


def test_modules_are_the_same_below_hearth(tmp_path: Path) -> None:
    files = {
        "clients/python/hearth_client/__init__.py": "",
        "daemon/door/wire.py": "from hearth_client import Client\n",
        "daemon/service.py": "def serve():\n    from hearth.daemon.door import wire\n",
        "daemon/door/__init__.py": "",
    }
    tree = written(tmp_path, files)
    assert tree.imported(tree.modules["daemon.door.wire"]) == {"hearth_client"}
    service = tree.modules["daemon.service"]
    assert tree.imported(service) == {"daemon.door", "daemon.door.wire"}


def test_a_relative_import_is_of_no_room(tmp_path: Path) -> None:
    tree = written(tmp_path, {"daemon/a.py": "from . import b\nimport os.path\n"})
    assert tree.files[0].rooms == {"", "os"}


def test_imports_up_and_beside(tmp_path: Path) -> None:
    files = {
        "daemon/high.py": "import daemon.low\n",
        "daemon/low.py": "import daemon.beside\nimport daemon.high\n",
        "daemon/beside.py": "",
    }
    floors = read_floors("```floors daemon\nhigh\nlow beside\n```\n")["daemon"]
    assert floors == [["high"], ["low", "beside"]]
    rises = written(tmp_path, files).rises("daemon", floors)
    assert rises == {("daemon.low", "daemon.high"), ("daemon.low", "daemon.beside")}


def test_each_circle_is_found(tmp_path: Path) -> None:
    files = {
        "daemon/a.py": "import daemon.b\n",
        "daemon/b.py": "import daemon.c\n",
        "daemon/c.py": "import daemon.a\n",
        "daemon/d.py": "import daemon.a\n",
        "tests/a.py": "import tests.b\n",
        "tests/b.py": "import tests.a\n",
    }
    tree = written(tmp_path, files)
    (circle,) = tree.circles(["daemon"])
    assert circle[0] == circle[-1]
    for here, there in pairwise(circle):
        assert there in tree.imported(tree.modules[here])
    assert len(tree.circles(["daemon", "tests"])) == 2
