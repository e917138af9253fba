"""Pages of the prefix cache, where they lie, and what has to be done to have them there."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runtime.prefix.identities import PAGE_TOKENS, TOKEN_BYTES

Tier = Literal["device", "host", "disk"]
MemoryTier = Literal["device", "host"]


class Rooms(NamedTuple):
    """How many pages each tier has room for."""

    device: int
    host: int = 0
    disk: int = 0


class Place(NamedTuple):
    """One slot of a tier's memory; it holds one page, base and draft."""

    tier: MemoryTier
    slot: int


@dataclass(eq=False, slots=True)
class Page:
    """Keys and values of up to `PAGE_TOKENS` tokens that follow those of `parent`.

    `tokens` are their identities. The root of a tree has none, and lies nowhere. Of what lies in
    memory, `draft` says whether the draft's state is there; of a page that lies on disk alone,
    whether it is there. `holds` counts who needs it where it is.
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
        """How many tokens it holds."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def tier(self) -> Tier | None:
        """The fastest tier in which it lies; None for a page that is gone."""
        if self.place is not None:
            return self.place.tier
        return "disk" if self.on_disk else None


class Match(NamedTuple):
    """The longest known prefix of a row: its first `tokens` tokens.

    The first `draft` of them have the draft's state as well. All `pages` but the last are taken
    whole.
    """

    pages: tuple[Page, ...] = ()
    tokens: int = 0
    draft: int = 0

    def cut(self, tokens: int) -> "Match":
        """What of it lies within the first `tokens` tokens."""
        tokens = min(tokens, self.tokens)
        return Match(self.pages[: -(-tokens // PAGE_TOKENS)], tokens, min(tokens, self.draft))


class Stored(NamedTuple):
    """A page that was found on disk: what it follows, and when it was used or written."""

    root: bytes
    parent: bytes
    tokens: bytes
    draft: bool
    used: float


class Save(NamedTuple):
    """Copy all the page's tokens, `first` and those behind it in the row, to the page's place.

    With `base` their keys and values of the base, with `draft` those of the draft.
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
    """Take the page away from the disk."""

    name: bytes


Change = Save | Move | Write | Erase
"""What a change of the index asks for. They are done in the order in which they are given, and what
reads a place does so before the next change writes to it.
"""
