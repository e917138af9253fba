"""Count the repository: sources, steps, forms of a request, messages, settings, tests, imports.

`python -m tools.house [--json] [--against COMMIT]` counts the working tree, in files that git knows
or would add, and a commit beside it. JSON holds what was counted as well. A figure is "-" where a
tree lacks what says it: docs/architecture.md its request blocks, tools/ its hops.py.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tools.source_tree import NO_SOURCES, SourceFile, SourceTree, read_floors

ROOT = Path(__file__).parents[1]
SMALL_LINES = 100
LONG_LINES = 60
FORBIDDEN_OPENING = re.compile(
    r"(?:How|It|Its|Likewise|Of|So|That|Their|These|They|This|Those|What|When|Where|Whether|Which"
    r"|Who|Whom|Whose|Why)\b"
)
"""First words of no docstring, which begins with a noun or an imperative verb."""
_ARCHITECTURE = "docs/architecture.md"
_HOPS = "tools/hops.py"
_BLOCK = r"^```request {}\n(.*?)^```$"
_OPTION = re.compile(r"^  (?:-\w, )?(--[\w-]+)", re.MULTILINE)
_NO_SETTINGS = ("--config", "--help", "--help-all")
_SCRIPT = re.compile(r'^hearth = "([\w.]+):(\w+)"$', re.MULTILINE)
_DEADLINE_S = 300


class Figure(NamedTuple):
    """One row: its value, and what was counted; None where the tree does not say it."""

    name: str
    value: int | None
    found: list[str]


def count_files(tree: SourceTree) -> Iterator[Figure]:
    """Sources, the package among them, and tests.

    Sources are Python files that are not empty, outside docs/ and tests/; the package are those of
    runtime, actors, daemon, bench, clients. Lines are physical ones, as ruff format leaves them.
    Tests are all Python files of tests/, `tests/system` and empty files included. The largest file
    is one of the sources or a CUDA source.
    """
    yield Figure("source_files", len(tree.sources), [])
    yield Figure("package_files", len(tree.package), [])
    lines = Counter[str]()
    for file in tree.package:
        lines[file.top] += file.lines
    shown = [f"{folder} {number}" for folder, number in lines.most_common()]
    yield Figure("package_lines", lines.total(), shown)
    cuda = [file for file in tree.files_named(".cu", ".cuh") if file.top not in NO_SOURCES]
    largest = sorted([*tree.sources, *cuda], key=lambda file: file.lines, reverse=True)[:10]
    shown = [f"{file.path} {file.lines}" for file in largest]
    yield Figure("largest_file_lines", largest[0].lines, shown)
    yield Figure("test_files", len(tree.tests), [])
    yield Figure("test_lines", sum(file.lines for file in tree.tests), [])


def count_small_files(tree: SourceTree) -> Figure:
    """Files of the package of at most 100 lines with one importer, which lies in their folder.

    Importers are other files of the package, `__init__` among them; an `__init__` is itself no
    such file.
    """
    importers = defaultdict[str, list[SourceFile]](list)
    for file in tree.package:
        for name in tree.imported(file):
            importers[name].append(file)
    found = []
    for file in tree.package:
        readers = importers[file.module]
        if file.path.name == "__init__.py" or file.lines > SMALL_LINES or len(readers) != 1:
            continue
        if readers[0].path.parent == file.path.parent:
            found.append(f"{file.path} {file.lines} <- {readers[0].path}")
    return Figure("small_files_with_one_reader", len(found), found)


def count_long_functions(tree: SourceTree) -> Figure:
    """Functions of the sources above 60 lines, from `def` to the last line of the body."""
    found = []
    for file in tree.sources:
        for node in ast.walk(file.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONG_LINES:
                    found.append((lines, f"{file.path}:{node.lineno} {node.name} {lines}"))
    return Figure("functions_above_60_lines", len(found), [one for _, one in sorted(found)[::-1]])


def count_requests(tree: SourceTree) -> Iterator[Figure]:
    """Classes of a request, in and back, and tables that know it, as docs/architecture.md says.

    A class is a line `module.Class`, a table one `module.Class.attribute ...`: what one object
    keeps by request counts once, however many collections that are. Raises ValueError where the
    code has no such class or attribute.
    """
    page = (tree.root / _ARCHITECTURE).read_text(encoding="utf-8")
    for block in ("classes in", "classes back", "tables"):
        name = "request_" + block.replace(" ", "_")
        match = re.search(_BLOCK.format(block), page, re.MULTILINE | re.DOTALL)
        if match is None:
            yield Figure(name, None, [])
            continue
        lines = match[1].splitlines()
        for line in lines:
            first, *more = line.split()
            owner, attributes = first, list[str]()
            if block == "tables":
                owner, _, attribute = first.rpartition(".")
                attributes = [attribute, *more]
            _check_class(tree, owner, attributes)
        yield Figure(name, len(lines), lines)


def _check_class(tree: SourceTree, name: str, attributes: list[str]) -> None:
    module, _, wanted = name.removeprefix("hearth.").rpartition(".")
    file = tree.modules.get(module)
    for node in file.tree.body if file else ():
        if isinstance(node, ast.ClassDef) and node.name == wanted:
            missing = set(attributes) - _attributes(node)
            if missing:
                raise ValueError(f"{_ARCHITECTURE} names {name}.{min(missing)}, which is not there")
            return
    raise ValueError(f"{_ARCHITECTURE} names {name}, which is not there")


def _attributes(owner: ast.ClassDef) -> set[str]:
    """Names that a class declares, or stores to as `self.name`."""
    found = set()
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def count_messages(tree: SourceTree) -> Figure:
    """Messages between actors and their parts: structs of actors/ that are encoded by position.

    That is `array_like`, own or inherited, as both ends are of one version; settings and command
    lines are encoded by name. Bases of messages count as well.
    """
    classes = [
        (f"{file.module}.{node.name}", node)
        for file in tree.sources
        if file.top == "actors"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
    ]
    positional: dict[str, str] = {}
    while True:
        before = len(positional)
        for name, node in classes:
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            own = any(word.arg == "array_like" for word in node.keywords)
            if (own and "Struct" in bases) or bases & positional.keys():
                positional[node.name] = name
        if len(positional) == before:
            return Figure("messages", before, sorted(positional.values()))


def count_settings(tree: SourceTree) -> Figure:
    """Settings that `hearth serve --help` shows: all options but --config and those for help."""
    script = _SCRIPT.search((tree.root / "pyproject.toml").read_text(encoding="utf-8"))
    if script is None:
        raise ValueError("pyproject.toml names no script hearth")
    started = f"from {script[1]} import {script[2]}; {script[2]}()"
    shown = _run_python(tree.root, "-c", started, "serve", "--help")
    found = [name for name in _OPTION.findall(shown) if name not in _NO_SETTINGS]
    return Figure("settings_shown", len(found), found)


def count_hops(tree: SourceTree) -> Iterator[Figure]:
    """Frames from loop to launch, own calls of a step and their files; see tools/hops.py.

    The program of the tree itself runs.
    """
    names = {"frames": "frames_to_launch", "calls": "calls_per_step", "files": "files_per_step"}
    if _HOPS not in tree.paths:
        yield from (Figure(name, None, []) for name in names.values())
        return
    told = json.loads(_run_python(tree.root, "-m", "tools.hops", "--json"))
    lists = {"frames": told["lists"]["frames"], "calls": told["lists"]["step"]}
    for key, name in names.items():
        yield Figure(name, told["figures"][key], lists.get(key, []))


def count_imports(tree: SourceTree) -> Iterator[Figure]:
    """Imports that run up inside a room, by the floors of docs/architecture.md, and circles.

    A circle is one of files of any rooms of the package. tests/test_layers.py holds both at none.
    """
    floors = read_floors((tree.root / _ARCHITECTURE).read_text(encoding="utf-8"))
    rooms = [name for floor in floors.pop("rooms") for name in floor]
    up = sorted({rise for room, those in floors.items() for rise in tree.rises(room, those)})
    yield Figure("imports_up", len(up), [f"{here} -> {there}" for here, there in up])
    circles = tree.circles(rooms)
    yield Figure("import_circles", len(circles), [" -> ".join(circle) for circle in circles])


def count_docstrings(tree: SourceTree) -> Figure:
    """Docstrings of the sources that begin with a forbidden word, those of attributes included."""
    found = [
        f"{file.path}:{line} {text.splitlines()[0]}"
        for file in tree.sources
        for line, text in docstrings(file.tree)
        if FORBIDDEN_OPENING.match(text)
    ]
    return Figure("docstrings_with_forbidden_openings", len(found), found)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands as a statement of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str) and text.strip():
                yield node.lineno, text.strip()


def count(tree: SourceTree) -> list[Figure]:
    """All rows of a tree."""
    return [
        *count_files(tree),
        count_small_files(tree),
        count_long_functions(tree),
        *count_hops(tree),
        *count_requests(tree),
        count_messages(tree),
        count_settings(tree),
        *count_imports(tree),
        count_docstrings(tree),
    ]


def working_tree(root: Path) -> SourceTree:
    """Files of a checkout that git knows, or would add."""
    paths = _git(root, "ls-files", "--cached", "--others", "--exclude-standard")
    return SourceTree(root, paths.decode().splitlines())


def tree_of(commit: str, folder: Path) -> SourceTree:
    """Files of a commit of this repository, unpacked into a new folder."""
    packed = folder.with_suffix(".tar")
    _git(ROOT, "archive", f"--output={packed}", commit)
    folder.mkdir()
    _run(["tar", "-xf", str(packed)], folder)
    return SourceTree(
        folder, _git(ROOT, "ls-tree", "-r", "--name-only", commit).decode().splitlines()
    )


def _git(root: Path, *arguments: str) -> bytes:
    return _run(["git", "-c", "core.quotePath=false", *arguments], root)


def _run_python(root: Path, *arguments: str) -> str:
    # The tree's own package comes before the one that is installed.
    path = os.pathsep.join(str(root / folder) for folder in ("src", "clients/python", "."))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "80"}
    return _run([sys.executable, *arguments], root, environment).decode()


def _run(command: list[str], root: Path, environment: dict[str, str] | None = None) -> bytes:
    done = subprocess.run(  # noqa: S603 - git and our own programs
        command, cwd=root, env=environment, check=True, stdout=subprocess.PIPE, timeout=_DEADLINE_S
    )
    return done.stdout


def main() -> None:
    """Print the figures of the working tree, and of a commit where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, with lists")
    parser.add_argument("--against", metavar="COMMIT", help="count this commit as well")
    given = parser.parse_args()
    columns = {"here": count(working_tree(ROOT))}
    if given.against:
        with TemporaryDirectory() as folder:
            columns[given.against] = count(tree_of(given.against, Path(folder) / "tree"))
    if given.json:
        print(json.dumps({name: _as_json(found) for name, found in columns.items()}, indent=2))
        return
    print(f"{'':<36}", *(f"{name:>12}" for name in columns))
    for row in zip(*columns.values(), strict=True):
        shown = ("-" if figure.value is None else f"{figure.value:,}" for figure in row)
        print(f"{row[0].name.replace('_', ' '):<36}", *(f"{value:>12}" for value in shown))


def _as_json(figures: list[Figure]) -> dict[str, object]:
    return {
        "figures": {figure.name: figure.value for figure in figures},
        "lists": {figure.name: figure.found for figure in figures if figure.found},
    }


if __name__ == "__main__":
    main()
