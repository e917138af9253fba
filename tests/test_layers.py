import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "runtime": ROOT / "runtime",
    "actors": ROOT / "actors",
    "daemon": ROOT / "daemon",
    "bench": ROOT / "bench",
    "hearth_client": ROOT / "clients" / "python" / "hearth_client",
}
MAY_IMPORT: dict[str, set[str]] = {
    "runtime": set(),
    "actors": {"runtime"},
    "daemon": {"runtime", "actors", "hearth_client"},
    "bench": {"runtime", "actors", "daemon", "hearth_client"},
    "hearth_client": set(),
}
ROOMS = {*FOLDERS, "models", "tests"}
FLOORS = {
    room: [line.split() for line in block.splitlines()]
    for room, block in re.findall(
        r"^```floors (\w+)\n(.*?)^```$",
        (ROOT / "docs" / "architecture.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
}
"""The packages and single modules of a room, from the highest floor to the lowest."""
ROOM_FLOORS = FLOORS.pop("rooms")
IO_MODULES = {"anyio", "asyncio", "multiprocessing", "socket", "subprocess", "uvloop", "zmq"}
UNSAFE_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
UNSAFE_BUILTINS = {"__import__", "eval", "exec"}
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj"}
# Runs the code blocks of our own pages, which is what it is for.
EXAMPLES = ROOT / "tests" / "clients" / "test_examples.py"
# A TensorRT builder may need another Python than ours: it is the one program that the runtime runs.
BUILDER = ROOT / "runtime" / "export" / "tensorrt" / "subprocess_builder.py"


@cache
def trees(room: str) -> dict[Path, ast.Module]:
    paths = sorted(FOLDERS.get(room, ROOT / room).rglob("*.py"))
    assert paths
    return {path: ast.parse(path.read_text()) for path in paths}


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """What is looked at in a module, walked through once."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.Constant)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@cache
def imports(tree: ast.Module) -> set[str]:
    """Top-level names of everything that a module imports, wherever it does so."""
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module or "")
    return {name.partition(".")[0] for name in found}


def unsafe(tree: ast.Module) -> set[str]:
    """What a module uses that can run code from data."""
    found = imports(tree) & UNSAFE_MODULES
    for node in nodes(tree):
        if isinstance(node, ast.Call):
            found |= _unsafe_call(node)
    return found


def _unsafe_call(node: ast.Call) -> set[str]:
    loose = {word.arg for word in node.keywords if word.arg == "allow_pickle"}
    match node.func:
        case ast.Name(id=name) if name in UNSAFE_BUILTINS:
            loose.add(name)
        case ast.Attribute(attr=name) if name in UNSAFE_METHODS:
            loose.add(name)
    return {name for name in loose if name}


@cache
def modules() -> dict[str, ast.Module]:
    """All files of the rooms by the name under which they are imported."""
    found = {}
    for room, folder in FOLDERS.items():
        for path, tree in trees(room).items():
            parts = (room, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = tree
    return found


@cache
def files_imported(tree: ast.Module) -> set[str]:
    """The files that a module names in its imports, a package's own `__init__` among them."""
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & modules().keys()


def rises(room: str, floors: list[list[str]]) -> set[tuple[str, str]]:
    """The imports of a room that do not lead to a lower floor, as pairs of files."""
    height = {name: -number for number, floor in enumerate(floors) for name in floor}
    found = set()
    for name, tree in modules().items():
        for other in files_imported(tree):
            if name.startswith(f"{room}.") and other.startswith(f"{room}."):
                here, there = name.split(".")[1], other.split(".")[1]
                if here != there and height[there] >= height[here]:
                    found.add((name, other))
    return found


@pytest.mark.parametrize("room", FLOORS)
def test_every_package_of_a_room_stands_on_one_floor(room: str) -> None:
    names = [name.split(".")[1] for name in modules() if name.startswith(f"{room}.")]
    assert sorted(name for floor in FLOORS[room] for name in floor) == sorted(set(names))


@pytest.mark.parametrize("room", FLOORS)
def test_no_import_runs_up(room: str) -> None:
    assert not rises(room, FLOORS[room])


def test_the_rooms_with_floors() -> None:
    assert {"runtime", "actors", "daemon"} <= FLOORS.keys()


def test_the_check_itself_finds_what_runs_up() -> None:
    assert rises("runtime", FLOORS["runtime"][::-1])


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {name: files_imported(tree) - {name} for name, tree in modules().items()}
    TopologicalSorter(graph).prepare()


def rooms_below(room: str) -> set[str]:
    """The rooms on the floors below this one's, as the page lists them."""
    height = next(place for place, floor in enumerate(ROOM_FLOORS) if room in floor)
    return {name for floor in ROOM_FLOORS[height + 1 :] for name in floor}


@pytest.mark.parametrize("room", FOLDERS)
def test_imports_go_one_way(room: str) -> None:
    for path, tree in trees(room).items():
        others = imports(tree) & (ROOMS - {room})
        assert others <= MAY_IMPORT[room] & rooms_below(room), path


def test_only_its_command_names_the_bench() -> None:
    """Imported by nobody; one string, which `hearth bench` loads, names a module of it."""
    naming = [
        path.relative_to(ROOT).as_posix()
        for room in (*sorted(set(FOLDERS) - {"bench"}), "models")
        for path, tree in trees(room).items()
        for node in nodes(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith("bench.")
    ]
    assert naming == ["daemon/cli/__init__.py"]


@pytest.mark.parametrize("room", FOLDERS)
def test_imports_are_absolute(room: str) -> None:
    for path, tree in trees(room).items():
        assert "" not in imports(tree), path


def test_the_runtime_knows_no_sockets_loops_or_processes() -> None:
    for path, tree in trees("runtime").items():
        allowed = {"subprocess"} if path == BUILDER else set()
        assert imports(tree) & IO_MODULES <= allowed, path


def test_the_client_needs_two_packages_only() -> None:
    allowed = {"hearth_client", "msgspec", "typing_extensions", "zmq", *sys.stdlib_module_names}
    for path, tree in trees("hearth_client").items():
        assert imports(tree) <= allowed, path


@pytest.mark.parametrize("room", [*FOLDERS, "models", "tests"])
def test_no_data_can_run_as_code(room: str) -> None:
    for path, tree in trees(room).items():
        allowed = {"exec"} if path == EXAMPLES else set()
        assert unsafe(tree) <= allowed, path


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "eval(text)",
        "socket.recv_pyobj()",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_check_itself_finds_what_is_unsafe(code: str) -> None:
    assert unsafe(ast.parse(code))
