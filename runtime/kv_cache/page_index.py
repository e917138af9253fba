"""Index of the pages of the prefix cache and their tiers; it decides and copies nothing."""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.pages import (
    PAGE_TOKENS,
    TOKEN_BYTES,
    Change,
    Erase,
    Match,
    MemoryTier,
    Move,
    Page,
    Place,
    Save,
    Stored,
    Tier,
    TierCapacity,
    TokenIdentities,
    Write,
    page_name,
    shared_tokens,
)


def nearest(parent: Page, own: bytes) -> tuple[Page | None, int]:
    """The child of `parent` that shares most first tokens with `own`, and their number."""
    # In the order of their bytes no page has more in common with them than the two beside them.
    at = bisect_left(parent.children, own, key=_tokens)
    beside = [
        (shared_tokens(one.tokens, own), one) for one in parent.children[max(at - 1, 0) : at + 1]
    ]
    shared, page = max(
        beside, key=lambda one: (one[0], one[1].place is not None, one[1].draft), default=(0, None)
    )
    return (page, shared) if shared else (None, 0)


def longer_child(parent: Page, own: bytes) -> Page | None:
    """The child of `parent` whose tokens begin with `own`, or equal it; None without one."""
    at = bisect_left(parent.children, own, key=_tokens)
    found = parent.children[at] if at < len(parent.children) else None
    return found if found and found.tokens.startswith(own) else None


def shorter_child(parent: Page, own: bytes) -> Page | None:
    """The child of `parent` whose tokens are a beginning of `own`; None without one."""
    at = bisect_left(parent.children, own, key=_tokens)
    found = parent.children[at - 1] if at else None
    return found if found and own.startswith(found.tokens) else None


def add_child(parent: Page, tokens: bytes) -> Page:
    """Add a child with these tokens to `parent`, and return it."""
    page = Page(page_name(parent.name, tokens), tokens, parent)
    parent.children.insert(bisect_left(parent.children, tokens, key=_tokens), page)
    return page


def path_to(page: Page) -> list[Page]:
    """The pages from the root, which is not among them, to this page."""
    path = []
    at: Page | None = page
    while at is not None and at.parent is not None:
        path.append(at)
        at = at.parent
    return path[::-1]


def root_of(page: Page) -> Page:
    """The root of the tree to which a page belongs, or belonged."""
    while page.parent is not None:
        page = page.parent
    return page


def all_behind(page: Page) -> list[Page]:
    """All descendants of a page, each after its parent."""
    pages = list(page.children)
    for one in pages:
        pages.extend(one.children)
    return pages


def _tokens(page: Page) -> bytes:
    return page.tokens


PINS_FULL = ("cache_full", "prefix_cache_bytes")
"""Code and field of the error raised when all clients together keep as much as they may."""


class Pins:
    """Names of pages by client, whether the pages are there yet or not.

    A client keeps at most a quarter of the pages of device memory, and all clients together keep at
    most three quarters, so that other pages can always come and go.
    """

    def __init__(self, room: int) -> None:
        self._each = room // 4
        self._all = 3 * room // 4
        # A dict for its order: a page's name comes behind that of the page before it.
        self._by_client: dict[int, dict[bytes, None]] = {}
        self._clients: Counter[bytes] = Counter()

    def __contains__(self, name: bytes) -> bool:
        return name in self._clients

    def __len__(self) -> int:
        """Number of pages that any client keeps."""
        return len(self._clients)

    def pin(self, client: int, names: Sequence[bytes]) -> list[bytes]:
        """Keep these pages for the client; returns, in order, the names that no client kept before.

        Raises `cache_full` with the field `cache` if that is more than the client may keep, and
        `PINS_FULL` if it is more than all clients may keep.
        """
        own = self._by_client.get(client, {})
        new = [name for name in names if name not in own]
        first = [name for name in new if name not in self._clients]
        if len(own) + len(new) > self._each:
            raise HearthError(
                "cache_full",
                f"to pin this prompt takes {len(new)} pages of the prefix cache, and this client"
                f" has {self._each - len(own)} left of the {self._each} that it may pin",
                "cache",
            )
        if len(self._clients) + len(first) > self._all:
            raise HearthError(
                "cache_full",
                f"to pin this prompt takes {len(first)} pages of the prefix cache, and of the"
                f" {self._all} that all clients may pin {self._all - len(self._clients)} are left",
                PINS_FULL[1],
            )
        if new:
            self._by_client.setdefault(client, {}).update(dict.fromkeys(new))
            self._clients.update(new)
        return first

    def unpin(self, client: int) -> list[bytes]:
        """Release all pages of a client; returns names that no client keeps, children first."""
        gone = []
        for name in reversed(self._by_client.pop(client, {})):
            self._clients[name] -= 1
            if not self._clients[name]:
                del self._clients[name]
                gone.append(name)
        return gone


MOST_WRITES = 8
"""Most pages that are written to disk so that one page may leave memory."""


class PageIndex:
    """Trees of pages: a path from a root is the beginning of a prompt (as SGLang's RadixAttention).

    A lookup of a page uses all its ancestors, and they count as used after it. So the least
    recently used page is a leaf, and a parent is never in a slower tier than its children. A page
    lies in one memory tier, and may have a copy on disk. Pinned and held pages stay in their tier.
    """

    def __init__(self, capacity: TierCapacity) -> None:
        self._capacity = capacity
        self._roots: dict[bytes, Page] = {}
        self._pages: dict[bytes, Page] = {}
        self._free: dict[MemoryTier, list[int]] = {
            "device": list(range(capacity.device))[::-1],
            "host": list(range(capacity.host))[::-1],
        }
        self._on_disk = 0
        # Those that may leave, the first one first.
        self._idle: dict[Tier, OrderedDict[Page, None]] = {
            "device": OrderedDict(),
            "host": OrderedDict(),
            "disk": OrderedDict(),
        }
        self._pins = Pins(capacity.device)
        self.evicted = 0
        """Number of pages that left all tiers for lack of room."""

    def __len__(self) -> int:
        return len(self._pages)

    def held_in(self, tier: Tier) -> int:
        """Number of pages in a tier; pages on disk may lie in memory as well."""
        if tier == "disk":
            return self._on_disk
        capacity = self._capacity.device if tier == "device" else self._capacity.host
        return capacity - len(self._free[tier])

    @property
    def pinned(self) -> int:
        """Number of pages that clients keep, including those not inserted yet."""
        return len(self._pins)

    def match(self, tokens: TokenIdentities, most: int) -> Match:
        """The longest known beginning of a row, of its first `most` tokens; it changes nothing."""
        most = min(most, len(tokens))
        at = self._roots.get(tokens.root)
        pages: list[Page] = []
        found = draft = 0
        while at is not None and found == len(pages) * PAGE_TOKENS and found < most:
            own = tokens.between(found, min(found + PAGE_TOKENS, most))
            at, shared = nearest(at, own)
            if at is not None:
                whole = draft == found and at.draft
                pages.append(at)
                found += shared
                draft = found if whole else draft
        return Match(tuple(pages), found, draft)

    def hold(self, pages: Iterable[Page]) -> None:
        """Keep the pages of a match in their tiers until `release`."""
        for page in pages:
            page.holds += 1
            for tier in _tiers(page):
                self._idle[tier].pop(page, None)

    def release(self, pages: Iterable[Page]) -> None:
        """Release held pages, of which some may be gone; they count as used now."""
        for page in reversed(list(pages)):
            page.holds -= 1
            if not page.holds:
                self._line_up(page)

    def insert(self, tokens: TokenIdentities, count: int, draft: int = 0) -> list[Change]:
        """Insert the pages of a row's first `count` tokens in device memory, as far as they fit.

        The row's cache slots hold all these tokens, and the draft's state of the first `draft`. A
        last page that is not full stays until a page with the same tokens and more replaces it.
        Pages that are there already count as used. The caller must carry out the changes before any
        other call, or call `drop` for the saved pages.
        """
        changes: list[Change] = []
        count = min(count, len(tokens))
        parent = self._root(tokens.root)
        path: list[Page] = []
        for first in range(0, count, PAGE_TOKENS):
            own = tokens.between(first, min(first + PAGE_TOKENS, count))
            page = self._have(parent, own, first, draft, changes)
            if page is None:
                break
            self.hold([page])
            path.append(page)
            parent = page
        self.release(path)
        return changes

    def pin(self, client: int, tokens: TokenIdentities, count: int) -> None:
        """Keep the full pages of a row's first `count` tokens, now or once they are inserted.

        Raises the errors of `Pins.pin`.
        """
        for name in self._pins.pin(client, tokens.page_names(count)):
            if name in self._pages:
                self.hold([self._pages[name]])

    def unpin(self, client: int) -> None:
        """Release all pages that this client keeps."""
        for name in self._pins.unpin(client):
            if name in self._pages:
                self.release([self._pages[name]])

    def drop(self, page: Page) -> list[Change]:
        """Forget a page that could not be saved or read, and all behind it, held or not."""
        changes: list[Change] = []
        if self._pages.get(page.name) is page:
            self._forget(page, changes)
        return changes

    def not_written(self, page: Page) -> list[Erase]:
        """Take a page that could not be written, and all behind it, off the disk."""
        changes: list[Change] = []
        for one in [page, *all_behind(page)][::-1]:
            if one.on_disk:
                self._leave_disk(one, changes)
        return [change for change in changes if isinstance(change, Erase)]

    def adopt(self, found: Sequence[Stored]) -> list[Change]:
        """Take over the pages found on disk; erase orphans and pages beyond the capacity.

        An orphan has no parent on disk. Beyond the capacity the least recently used pages go.
        """
        by_parent: dict[bytes, list[Stored]] = {}
        for stored in found:
            by_parent.setdefault(stored.parent, []).append(stored)
        used: dict[Page, float] = {}
        due = [self._root(name) for name in {stored.root for stored in found}]
        for parent in due:
            for stored in by_parent.pop(parent.name, ()):
                page = self._attach(parent, stored.tokens)
                page.draft = page.draft_on_disk = stored.draft
                self._lie_on_disk(page)
                used[page] = stored.used
                due.append(page)
        # Whoever came for a page came for its parent as well: those behind come first.
        for page in reversed(due):
            if page.parent in used:
                used[page.parent] = max(used[page.parent], used[page])
        for _, _, page in sorted((used[one], -place, one) for place, one in enumerate(used)):
            self._idle["disk"].move_to_end(page)
        changes: list[Change] = [
            Erase(page_name(stored.parent, stored.tokens))
            for orphans in by_parent.values()
            for stored in orphans
        ]
        while self._on_disk > self._capacity.disk:
            self._leave_disk(next(iter(self._idle["disk"])), changes)
        return changes

    def unwritten(self) -> list[Change]:
        """Write pages in memory that are not on disk, as many as fit, at the end of a process.

        The most recently used pages come first.
        """
        changes: list[Change] = []
        for page in reversed(self._by_use()[: self._capacity.disk]):
            self._spill(page, len(self._pages), changes)
        return changes

    def _by_use(self) -> list[Page]:
        """Pages in memory, the most recently used first, and each behind its parent."""
        held = [page for page in self._pages.values() if page.place and page.holds]
        idle = [*reversed(self._idle["device"]), *reversed(self._idle["host"])]
        return sorted(held, key=lambda page: len(path_to(page))) + idle

    def _root(self, name: bytes) -> Page:
        if name not in self._roots:
            self._roots[name] = Page(name, b"", None)
        return self._roots[name]

    def _have(
        self, parent: Page, own: bytes, first: int, draft: int, changes: list[Change]
    ) -> Page | None:
        """Return the child with these tokens, in device memory; None if it does not fit."""
        has_draft = draft >= first + len(own) // TOKEN_BYTES
        page = longer_child(parent, own)
        if page is not None:
            if page.tokens != own:
                return page
            if page.place is not None and page.place.tier == "device":
                if has_draft and not page.draft:
                    page.draft = True
                    changes.append(Save(page, page.place, first, base=False, draft=True))
                return page
            self.hold([page])
            place = self._take("device", changes)
            self.release([page])
            if place is None:
                return None
            source = page.place
            self._free_place(page)
            if source is not None and page.draft and not has_draft:
                page.place = place
                changes.append(Move(page, source, place))
                return page
        else:
            shorter = shorter_child(parent, own)
            if shorter is not None and not shorter.holds:
                self._forget(shorter, changes)
            place = self._take("device", changes)
            if place is None:
                return None
            page = self._attach(parent, own)
        page.place = place
        page.draft = has_draft
        changes.append(Save(page, place, first, base=True, draft=has_draft))
        return page

    def _attach(self, parent: Page, tokens: bytes) -> Page:
        page = add_child(parent, tokens)
        self._pages[page.name] = page
        page.holds = int(page.name in self._pins)
        return page

    def _take(self, tier: MemoryTier, changes: list[Change]) -> Place | None:
        """A place that is free, or that of the page that was not used for the longest time."""
        free = self._free[tier]
        oldest = None if free else next(iter(self._idle[tier]), None)
        if oldest is not None and oldest.place is not None:
            self._evict(oldest, oldest.place, changes)
        return Place(tier, free.pop()) if free else None

    def _evict(self, page: Page, source: Place, changes: list[Change]) -> None:
        """Move a page to host memory, else to disk, else forget it."""
        target = self._take("host", changes) if source.tier == "device" else None
        if target is not None:
            changes.append(Move(page, source, target))
        elif not self._spill(page, MOST_WRITES, changes):
            self.evicted += 1
            self._forget(page, changes)
            return
        self._free_place(page)
        page.place = target
        if target is None:
            page.draft = page.draft_on_disk
        else:
            self._idle["host"][page] = None

    def _spill(self, page: Page, most: int, changes: list[Change]) -> bool:
        """Write a page to disk after its ancestors that are not there; True if it is there then."""
        path = path_to(page)
        due = [
            (one, one.place)
            for one in path
            if one.place is not None and (not one.on_disk or one.draft > one.draft_on_disk)
        ]
        for one, place in due[:most]:
            if not one.on_disk and self._on_disk >= self._capacity.disk:
                oldest = next((old for old in self._idle["disk"] if old not in path), None)
                if oldest is None:
                    break
                self.evicted += oldest.place is None
                self._leave_disk(oldest, changes)
            changes.append(Write(one, place))
            one.draft_on_disk = one.draft
            if not one.on_disk:
                self._lie_on_disk(one)
        for one in reversed(path):
            if one in self._idle["disk"]:
                self._idle["disk"].move_to_end(one)
        return page.on_disk

    def _lie_on_disk(self, page: Page) -> None:
        page.on_disk = True
        self._on_disk += 1
        if not page.holds:
            self._idle["disk"][page] = None

    def _leave_disk(self, page: Page, changes: list[Change]) -> None:
        if page.place is None:
            self._forget(page, changes)
            return
        page.on_disk = page.draft_on_disk = False
        self._on_disk -= 1
        self._idle["disk"].pop(page, None)
        changes.append(Erase(page.name))

    def _free_place(self, page: Page) -> None:
        if page.place is not None:
            self._idle[page.place.tier].pop(page, None)
            self._free[page.place.tier].append(page.place.slot)
            page.place = None

    def _forget(self, page: Page, changes: list[Change]) -> None:
        """Take a page and all behind it out of the tree and off every tier."""
        for one in [page, *all_behind(page)][::-1]:
            self._free_place(one)
            if one.on_disk:
                one.on_disk = one.draft_on_disk = False
                self._on_disk -= 1
                self._idle["disk"].pop(one, None)
                changes.append(Erase(one.name))
            del self._pages[one.name]
            if one.parent is not None:
                one.parent.children.remove(one)

    def _line_up(self, page: Page) -> None:
        """Let it be the last that has to leave the tiers in which it lies."""
        for tier in _tiers(page):
            self._idle[tier][page] = None
            self._idle[tier].move_to_end(page)


def _tiers(page: Page) -> Iterator[Tier]:
    if page.place is not None:
        yield page.place.tier
    if page.on_disk:
        yield "disk"
