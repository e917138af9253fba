import ast
import sys
from pathlib import PurePosixPath

import pytest

from tests.tools.trees import ROOT, repository
from tools.source_tree import SourceFile, read_floors

MAY_IMPORT: dict[str, set[str]] = {
    "runtime": set(),
    "actors": {"runtime"},
    "daemon": {"runtime", "actors", "hearth_client"},
    "bench": {"runtime", "actors", "daemon", "hearth_client"},
    "hearth_client": set(),
    "hearth_http": {"hearth_client"},
}
ROOMS = {*MAY_IMPORT, "models", "tests", "tools"}
INSTALLED = {"actors", "bench", "daemon", "runtime"}
FLOORS = read_floors((ROOT / "docs" / "architecture.md").read_text())
ROOM_FLOORS = FLOORS.pop("rooms")
IO_MODULES = {"anyio", "asyncio", "multiprocessing", "socket", "subprocess", "uvloop", "zmq"}
UNSAFE_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
UNSAFE_BUILTINS = {"__import__", "eval", "exec"}
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj"}
# Runs the code blocks of our own pages, which is what it is for.
EXAMPLES = "tests.clients.test_examples"
# A TensorRT builder may need another Python than ours: it is the one program that the runtime runs.
BUILDER = "runtime.export.tensorrt.plan"


def files_of(room: str) -> list[SourceFile]:
    found = [file for file in repository().files if file.module.partition(".")[0] == room]
    assert found
    return found


def unsafe(file: SourceFile) -> set[str]:
    """What a module uses that can run code from data."""
    found = file.rooms & UNSAFE_MODULES
    for node in file.nodes:
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


@pytest.mark.parametrize("room", FLOORS)
def test_every_package_of_a_room_stands_on_one_floor(room: str) -> None:
    names = [name.split(".")[1] for name in repository().modules if name.startswith(f"{room}.")]
    assert sorted(name for floor in FLOORS[room] for name in floor) == sorted(set(names))


@pytest.mark.parametrize("room", FLOORS)
def test_no_import_runs_up(room: str) -> None:
    assert not repository().rises(room, FLOORS[room])


def test_the_rooms_with_floors() -> None:
    assert {"runtime", "actors", "daemon"} <= FLOORS.keys()


def test_the_check_itself_finds_what_runs_up() -> None:
    assert repository().rises("runtime", FLOORS["runtime"][::-1])


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not repository().circles(MAY_IMPORT)


def rooms_below(room: str) -> set[str]:
    """The rooms on the floors below this one's, as the page lists them."""
    height = next(place for place, floor in enumerate(ROOM_FLOORS) if room in floor)
    return {name for floor in ROOM_FLOORS[height + 1 :] for name in floor}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_go_one_way(room: str) -> None:
    for file in files_of(room):
        others = file.rooms & (ROOMS - {room})
        assert others <= MAY_IMPORT[room] & rooms_below(room), file.path


def test_only_its_command_names_the_bench() -> None:
    """Imported by nobody; one string, which `hearth bench` loads, names a module of it."""
    naming = [
        file.module
        for room in (*sorted(set(MAY_IMPORT) - {"bench"}), "models")
        for file in files_of(room)
        for node in file.nodes
        if isinstance(node, ast.Constant) and str(node.value).startswith("hearth.bench.")
    ]
    assert naming == ["daemon.cli"]


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_what_is_installed_is_imported_from_hearth(room: str) -> None:
    """In a checkout the folders at the top could be imported by their own names too."""
    for file in files_of(room):
        assert not {name.partition(".")[0] for name in file.imports} & INSTALLED, file.path


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_are_absolute(room: str) -> None:
    for file in files_of(room):
        assert "" not in file.rooms, file.path


def test_the_runtime_knows_no_sockets_loops_or_processes() -> None:
    for file in files_of("runtime"):
        allowed = {"subprocess"} if file.module == BUILDER else set()
        assert file.rooms & IO_MODULES <= allowed, file.path


def test_the_client_needs_two_packages_only() -> None:
    allowed = {"hearth_client", "msgspec", "typing_extensions", "zmq", *sys.stdlib_module_names}
    for file in files_of("hearth_client"):
        # Imported where trio runs alone.
        given = {"trio"} if file.path.name == "trio_loop.py" else set[str]()
        assert file.rooms <= allowed | given, file.path


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_no_data_can_run_as_code(room: str) -> None:
    for file in files_of(room):
        allowed = {"exec"} if file.module == EXAMPLES else set()
        assert unsafe(file) <= allowed, file.path


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
    assert unsafe(SourceFile(PurePosixPath("code.py"), code))
