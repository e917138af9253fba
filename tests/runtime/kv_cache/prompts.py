"""Prompts of few blocks, so that many begin alike."""

from collections.abc import Sequence

from hypothesis import strategies as st

from hearth.runtime.kv_cache.pages import PAGE_TOKENS, TOKEN_BYTES, TokenIdentities, root_name

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
