"""Prompts of few blocks, so that many begin alike, and folders of a few small pages."""

from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES, DiskCache
from hearth.runtime.kv_cache.pages import (
    PAGE_TOKENS,
    TOKEN_BYTES,
    Page,
    TokenIdentities,
    page_name,
    root_name,
)

ROOTS = [root_name(b"engine", adapter) for adapter in (b"", b"adapter")]
Beginning = tuple[bytes, bytes]
"""A root and the tokens behind it."""


def ids(blocks: Sequence[int], rest: int = 0) -> list[int]:
    """The ids of full pages, each of one token's repetition, and the beginning of one more."""
    return [block for block in blocks for _ in range(PAGE_TOKENS)] + list(range(100, 100 + rest))


def identities(blocks: Sequence[int], rest: int = 0, root: bytes = ROOTS[0]) -> TokenIdentities:
    return TokenIdentities(root, ids(blocks, rest))


@st.composite
def prompts(draw: st.DrawFn) -> TokenIdentities:
    """Up to four blocks of two kinds, and a rest that goes on in one of two ways."""
    blocks = draw(st.lists(st.integers(0, 1), max_size=4))
    rest = draw(st.sampled_from([0, 0, 1, 20, 31]))
    way = draw(st.integers(0, 1))
    token_ids = ids(blocks) + [40 + way] * (rest // 2) + [50] * (rest - rest // 2)
    return TokenIdentities(draw(st.sampled_from(ROOTS)), token_ids)


def beginnings(prompt: TokenIdentities, count: int) -> list[Beginning]:
    """What the pages of its first tokens hold: the root, and all tokens up to the page's end."""
    ends = [*range(PAGE_TOKENS, count, PAGE_TOKENS), count] if count else []
    return [(prompt.root, prompt.between(0, end)) for end in ends]


def common(one: bytes, other: bytes) -> int:
    """Tokens that two have in common, looked at one by one."""
    shared = 0
    while (
        shared * TOKEN_BYTES < min(len(one), len(other))
        and one[: (shared + 1) * TOKEN_BYTES] == other[: (shared + 1) * TOKEN_BYTES]
    ):
        shared += 1
    return shared


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
