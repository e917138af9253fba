"""Folders of a few small pages."""

from pathlib import Path

from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES, DiskCache
from hearth.runtime.kv_cache.pages import Page, page_name
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


def open_folder(folder: Path, engine: bytes = b"engine", room: int = 10) -> DiskCache:
    return DiskCache(folder, engine, PAGE_BYTES, room * FILE_BYTES)


def fill(folder: Path, blocks: list[int], engine: bytes = b"engine") -> list[Page]:
    """A folder that was closed with these pages in it."""
    disk_cache = open_folder(folder, engine)
    written = pages(blocks)
    for page in written:
        assert disk_cache.write(page, DATA)
    disk_cache.close(SOON_S)
    assert disk_cache.take_failures() == []
    return written


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
