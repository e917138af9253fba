"""Pages of the prefix cache, their places, and the changes that bring them there."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from hearth.runtime.images import EmbeddedImage, ImageSpan

PAGE_TOKENS = 32
TOKEN_BYTES = 16
"""Bytes of a token's identity: its id and zeros, or its place in an image and a digest."""
NAME_BYTES = 16
"""Bytes of the name of a page or of a root."""


class TokenIdentities:
    """The identities of a row's tokens, behind the name of the engine that computes them.

    Keys and values of a token follow from its identity, from the identities of all tokens before
    it, and from `root` (`root_name`). The identity of an image token is the image's key, its span
    and the token's position in it; its id does not count. An image without a key equals no other:
    the identities end before it.
    """

    def __init__(
        self, root: bytes, token_ids: Sequence[int], images: Sequence[EmbeddedImage] = ()
    ) -> None:
        strange = [span.start for image in images if not image.key for span in image.spans]
        known = min([len(token_ids), *strange])
        words = np.zeros((known, TOKEN_BYTES // 4), "<i4")
        words[:, 0] = token_ids[:known]
        for image in images:
            for span in image.spans if image.key else ():
                rows = words[span.start : span.start + span.length]
                # Below zero, which no id is.
                rows[:, 0] = -1 - np.arange(len(rows))
                rows[:, 1:] = np.frombuffer(_digest_of(image, span), "<i4")
        self.root = root
        self._words = words.tobytes()

    def __len__(self) -> int:
        return len(self._words) // TOKEN_BYTES

    def between(self, begin: int, end: int) -> bytes:
        """The identities of tokens `begin` to `end` - 1, `TOKEN_BYTES` each."""
        return self._words[begin * TOKEN_BYTES : end * TOKEN_BYTES]

    def page_names(self, count: int) -> list[bytes]:
        """The names of the pages that the first `count` tokens fill, in their order."""
        names = [self.root]
        for begin in range(0, min(count, len(self)) - PAGE_TOKENS + 1, PAGE_TOKENS):
            names.append(page_name(names[-1], self.between(begin, begin + PAGE_TOKENS)))
        return names[1:]


def root_name(engine: bytes, adapter: bytes, salt: str = "") -> bytes:
    """The name of the root before the first pages of an engine with an adapter.

    `engine` and `adapter` are digests, `adapter` b"" for none. Requests of another `salt` have
    another root. No page has the name of a root.
    """
    root = _digest(len(engine).to_bytes(2, "little") + engine + adapter)
    return _digest(salt.encode(), key=root) if salt else root


def page_name(parent: bytes, tokens: bytes) -> bytes:
    """A page's name: a digest of its tokens and of the name of the page, or root, before it."""
    return _digest(parent + tokens)


def shared_tokens(one: bytes, other: bytes) -> int:
    """Number of tokens that two pieces of identities share from their beginning."""
    if other.startswith(one):
        return len(one) // TOKEN_BYTES
    most = min(len(one), len(other))
    for end in range(TOKEN_BYTES, most + 1, TOKEN_BYTES):
        if one[end - TOKEN_BYTES : end] != other[end - TOKEN_BYTES : end]:
            return end // TOKEN_BYTES - 1
    return most // TOKEN_BYTES


def _digest_of(image: EmbeddedImage, span: ImageSpan) -> bytes:
    # The grid and the interval give the positions, of these tokens and of all behind them.
    said = f"{span.first} {span.grid} {span.interval!r} ".encode() + image.key
    return hashlib.blake2b(said, digest_size=TOKEN_BYTES - 4).digest()


def _digest(data: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=NAME_BYTES, key=key).digest()


Tier = Literal["device", "host", "disk"]
MemoryTier = Literal["device", "host"]


class TierCapacity(NamedTuple):
    """Number of pages that each tier can hold."""

    device: int
    host: int = 0
    disk: int = 0


class Place(NamedTuple):
    """One slot of a tier's memory; it holds one page, base and draft."""

    tier: MemoryTier
    slot: int


@dataclass(eq=False, slots=True)
class Page:
    """Keys and values of up to `PAGE_TOKENS` tokens behind the tokens of `parent`.

    `tokens` are the tokens' identities. The root of a tree has no tokens, and lies in no tier.
    `draft` is True if the page has the draft's state in memory, or on disk if it lies on disk only.
    `holds` counts the holders for which the page must stay in its tier.
    """

    name: bytes
    tokens: bytes
    parent: "Page | None"
    place: Place | None = None
    draft: bool = False
    on_disk: bool = False
    draft_on_disk: bool = False
    holds: int = 0
    children: list["Page"] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of tokens of the page."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def tier(self) -> Tier | None:
        """The fastest tier in which it lies; None for a page that is gone."""
        if self.place is not None:
            return self.place.tier
        return "disk" if self.on_disk else None


class Match(NamedTuple):
    """The longest known prefix of a row: its first `tokens` tokens.

    The first `draft` tokens have the draft's state as well. All `pages` but the last are taken
    whole.
    """

    pages: tuple[Page, ...] = ()
    tokens: int = 0
    draft: int = 0

    def cut(self, tokens: int) -> "Match":
        """Return the part of the match within the first `tokens` tokens."""
        tokens = min(tokens, self.tokens)
        return Match(self.pages[: -(-tokens // PAGE_TOKENS)], tokens, min(tokens, self.draft))


class Stored(NamedTuple):
    """Page found on disk, the page before it, and the time of its last use."""

    root: bytes
    parent: bytes
    tokens: bytes
    draft: bool
    used: float


class Save(NamedTuple):
    """Copy the page's tokens, from token `first` of the row on, to the page's place.

    With `base` copy the keys and values of the base, with `draft` the entries of the draft.
    """

    page: Page
    place: Place
    first: int
    base: bool
    draft: bool


class Move(NamedTuple):
    """Copy the whole page from one place to another."""

    page: Page
    source: Place
    target: Place


class Write(NamedTuple):
    """Write the page, which lies at `source`, to disk."""

    page: Page
    source: Place


class Erase(NamedTuple):
    """Remove the page from the disk."""

    name: bytes


Change = Save | Move | Write | Erase
"""Copy, write or removal that a change of the index requires.

Changes are done in the given order: a place is read before a later change writes to it.
"""
