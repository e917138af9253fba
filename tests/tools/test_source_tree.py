from itertools import pairwise
from pathlib import Path

from tests.tools.trees import written
from tools.source_tree import read_floors


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
