"""Trees of pages: the path from a root to a page is the beginning of a prompt."""

from bisect import bisect_left

from runtime.prefix.identities import page_name, shared_tokens
from runtime.prefix.pages import Page


def nearest(parent: Page, own: bytes) -> tuple[Page | None, int]:
    """The page behind `parent` that has most in common with these tokens, and how much."""
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
    """The page behind `parent` that begins with these tokens, or holds just them."""
    at = bisect_left(parent.children, own, key=_tokens)
    found = parent.children[at] if at < len(parent.children) else None
    return found if found and found.tokens.startswith(own) else None


def shorter_child(parent: Page, own: bytes) -> Page | None:
    """The page behind `parent` with which these tokens begin, and go on."""
    at = bisect_left(parent.children, own, key=_tokens)
    found = parent.children[at - 1] if at else None
    return found if found and own.startswith(found.tokens) else None


def add_child(parent: Page, tokens: bytes) -> Page:
    """A new page with these tokens behind `parent`."""
    page = Page(page_name(parent.name, tokens), tokens, parent)
    parent.children.insert(bisect_left(parent.children, tokens, key=_tokens), page)
    return page


def path_to(page: Page) -> list[Page]:
    """The pages from the root, which is none, to this one."""
    path = []
    at: Page | None = page
    while at is not None and at.parent is not None:
        path.append(at)
        at = at.parent
    return path[::-1]


def root_of(page: Page) -> Page:
    """The root of the tree in which a page stands, or stood."""
    while page.parent is not None:
        page = page.parent
    return page


def all_behind(page: Page) -> list[Page]:
    """All pages behind this one, each behind its parent."""
    pages = list(page.children)
    for one in pages:
        pages.extend(one.children)
    return pages


def _tokens(page: Page) -> bytes:
    return page.tokens
