"""Python files of a checkout: which of them count as what, what they import, and their floors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

PACKAGE = frozenset({"actors", "bench", "clients", "daemon", "runtime", "src"})
"""Top folders that are installed. The others' sources, such as models/ and tools/, are not."""
NO_SOURCES = frozenset({"docs", "tests"})
_FLOORS = re.compile(r"^```floors (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class SourceFile:
    """A source file, by its path in the checkout."""

    path: PurePosixPath
    text: str

    @property
    def top(self) -> str:
        """Top folder of the checkout in which it lies."""
        return self.path.parts[0]

    @property
    def lines(self) -> int:
        """Physical lines, blank ones and comments included."""
        return self.text.count("\n")

    @property
    def module(self) -> str:
        """Name without `hearth.`, under which other files import it."""
        name = ".".join(self.path.with_suffix("").parts)
        for prefix in ("clients.python.", "clients.http.", "src.", "hearth."):
            name = name.removeprefix(prefix)
        return name.removesuffix(".__init__")

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree of the file."""
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All imports, calls and constants of the file, walked through once."""
        kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.Constant)
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    @cached_property
    def imports(self) -> set[str]:
        """Modules and members that it imports, in functions too; relative ones with their dots."""
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        return found

    @property
    def rooms(self) -> set[str]:
        """Top-level names of its imports, without `hearth.`; "" for a relative one."""
        return {name.removeprefix("hearth.").partition(".")[0] for name in self.imports}


class SourceTree:
    """All Python files of the given paths, parsed where somebody asks."""

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self.root = root
        self.paths = sorted(path for path in set(paths) if (root / path).is_file())
        self.files = self.files_named(".py")
        self.modules = {file.module: file for file in self.files}

    def files_named(self, *endings: str) -> list[SourceFile]:
        """Files whose names end so, read anew."""
        return [
            SourceFile(PurePosixPath(path), (self.root / path).read_text(encoding="utf-8"))
            for path in self.paths
            if path.endswith(endings)
        ]

    @property
    def sources(self) -> list[SourceFile]:
        """Files that are not empty, of all top folders but docs/ and tests/."""
        return [one for one in self.files if one.text and one.top not in NO_SOURCES]

    @property
    def package(self) -> list[SourceFile]:
        """Sources that are installed, those of the client included."""
        return [one for one in self.sources if one.top in PACKAGE]

    @property
    def tests(self) -> list[SourceFile]:
        """Files of tests/, empty ones included."""
        return [one for one in self.files if one.top == "tests"]

    def imported(self, file: SourceFile) -> set[str]:
        """Modules of this tree that a file names in its imports, `__init__` of packages too."""
        names = {name.removeprefix("hearth.") for name in file.imports}
        return (names & self.modules.keys()) - {file.module}

    def rises(self, room: str, floors: list[list[str]]) -> set[tuple[str, str]]:
        """Imports inside a room that do not lead to a lower floor, as pairs of modules."""
        height = {name: -number for number, floor in enumerate(floors) for name in floor}
        found = set()
        for name, file in self.modules.items():
            for other in self.imported(file):
                if name.startswith(f"{room}.") and other.startswith(f"{room}."):
                    here, there = name.split(".")[1], other.split(".")[1]
                    if here != there and height[there] >= height[here]:
                        found.add((name, other))
        return found

    def circles(self, rooms: Iterable[str]) -> list[list[str]]:
        """Circles of imports in these rooms, each cut at one import before the next is sought."""
        kept = {name for name in self.modules if name.partition(".")[0] in rooms}
        graph = {name: self.imported(self.modules[name]) & kept for name in kept}
        found: list[list[str]] = []
        while circle := _circle_in(graph):
            found.append(circle)
            graph[circle[0]].discard(circle[1])
        return found


def _circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another, each the next and the last the first; [] for none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle[::-1]
    return []


def read_floors(page: str) -> dict[str, list[list[str]]]:
    """Packages and single modules of each room, from the highest floor to the lowest.

    Those of "rooms" are the rooms themselves.
    """
    blocks: list[tuple[str, str]] = _FLOORS.findall(page)
    return {room: [line.split() for line in block.splitlines()] for room, block in blocks}
