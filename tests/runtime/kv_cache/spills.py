"""Folders of a few small pages."""

from pathlib import Path

from hearth.runtime.kv_cache.pages import Page, page_name
from hearth.runtime.kv_cache.spill_folder import HEAD_BYTES, SpillFolder
from tests.runtime.kv_cache.prompts import ROOTS, identities

PAGE_BYTES = 100
FILE_BYTES = HEAD_BYTES + PAGE_BYTES
SOON_S = 20.0
DATA = bytes(range(PAGE_BYTES))


def pages(blocks: list[int], *, draft: bool = False) -> list[Page]:
    """The pages of a prompt, as the index has them."""
    before = Page(ROOTS[0], b"", None)
    found = []
    for place in range(len(blocks)):
        tokens = identities(blocks).between(32 * place, 32 * place + 32)
        before = Page(page_name(before.name, tokens), tokens, before, draft=draft)
        found.append(before)
    return found


def open_folder(folder: Path, engine: bytes = b"engine", room: int = 10) -> SpillFolder:
    return SpillFolder(folder, engine, PAGE_BYTES, room * FILE_BYTES)


def fill(folder: Path, blocks: list[int], engine: bytes = b"engine") -> list[Page]:
    """A folder that was closed with these pages in it."""
    spill = open_folder(folder, engine)
    written = pages(blocks)
    for page in written:
        assert spill.write(page, DATA)
    spill.close(SOON_S)
    assert spill.take_failures() == []
    return written


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
