"""Trees of sources: this repository's, and such as a test writes."""

from functools import cache
from pathlib import Path

from tools.source_tree import SourceTree

ROOT = Path(__file__).parents[2]
FOLDERS = ("actors", "bench", "clients", "daemon", "models", "runtime", "tests", "tools")


@cache
def repository() -> SourceTree:
    paths = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    # Environments and what is built lie beside the clients.
    own = [path for path in paths if not any(p[0] == "." or p == "build" for p in path.parts)]
    return SourceTree(ROOT, [path.as_posix() for path in own])


def written(folder: Path, files: dict[str, str]) -> SourceTree:
    """A tree of these files, by path and text."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return SourceTree(folder, files)
