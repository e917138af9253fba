"""The index and the memories that it speaks of, under all that may be asked in any order."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.page_index import PageIndex
from hearth.runtime.kv_cache.pages import (
    PAGE_TOKENS,
    TOKEN_BYTES,
    Change,
    Erase,
    Move,
    Page,
    Place,
    Save,
    TierCapacity,
    TokenIdentities,
    Write,
)
from tests.runtime.kv_cache.prompts import Beginning, identities, prompts

PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES


class Memories:
    """Does what the index asks for, and knows what then lies where."""

    def __init__(self) -> None:
        self.slots: dict[Place, tuple[Beginning, bool]] = {}
        self.disk: dict[bytes, tuple[Beginning, bool]] = {}

    def do(self, changes: Sequence[Change], prompt: TokenIdentities | None = None) -> None:
        for change in changes:
            match change:
                case Save(page, place, first, base, draft):
                    assert prompt is not None, "only rows bring what is saved"
                    own = (prompt.root, prompt.between(0, first + page.length))
                    if not base:
                        assert self.slots[place] == (own, False)
                    self.slots[place] = (own, draft)
                case Move(_, source, target):
                    self.slots[target] = self.slots.pop(source)
                case Write(page, source):
                    self.disk[page.name] = self.slots[source]
                case Erase(name):
                    del self.disk[name]


class House:
    """An index and its memories under all that may be asked of them in any order."""

    def __init__(self, capacity: TierCapacity) -> None:
        self.capacity = capacity
        self.index = PageIndex(capacity)
        self.memories = Memories()
        self.held: list[tuple[Page, ...]] = []

    def insert(self, prompt: TokenIdentities, _: int = 0) -> None:
        self.memories.do(self.index.insert(prompt, len(prompt)), prompt)

    def draft(self, prompt: TokenIdentities, client: int) -> None:
        self.memories.do(self.index.insert(prompt, len(prompt), len(prompt) - client), prompt)

    def hold(self, prompt: TokenIdentities, _: int) -> None:
        self.held.append(self.index.match(prompt, len(prompt)).pages)
        self.index.hold(self.held[-1])

    def release(self, *_: object) -> None:
        if self.held:
            self.index.release(self.held.pop(0))

    def pin(self, prompt: TokenIdentities, client: int) -> None:
        with suppress(HearthError):
            self.index.pin(client, prompt, len(prompt))

    def unpin(self, _: TokenIdentities, client: int) -> None:
        self.index.unpin(client)

    def drop(self, prompt: TokenIdentities, _: int) -> None:
        for page in self.index.match(prompt, len(prompt)).pages[-1:]:
            self.memories.do(self.index.drop(page))

    def not_written(self, prompt: TokenIdentities, _: int) -> None:
        for page in self.index.match(prompt, len(prompt)).pages[-1:]:
            self.memories.do(self.index.not_written(page))

    def check(self, prompt: TokenIdentities) -> None:
        """What is found lies where it is said to, and is what the prompt begins with."""
        found = self.index.match(prompt, len(prompt))
        assert -(-found.tokens // PAGE_TOKENS) == len(found.pages)
        tiers = [("device", "host", "disk").index(page.tier or "") for page in found.pages]
        assert tiers == sorted(tiers)
        for number, page in enumerate(found.pages):
            begin = number * PAGE_TOKENS
            end = min(begin + PAGE_TOKENS, found.tokens)
            if page.place is not None:
                (root, text), draft = self.memories.slots[page.place]
            else:
                (root, text), draft = self.memories.disk[page.name]
            assert root == prompt.root
            assert text.startswith(prompt.between(0, end))
            assert len(text) == (begin + page.length) * TOKEN_BYTES
            assert draft == page.draft
            assert draft >= (end <= found.draft)
        for tier in ("device", "host", "disk"):
            assert self.index.held_in(tier) <= getattr(self.capacity, tier)
        assert self.index.held_in("disk") == len(self.memories.disk)
        stored = {beginning for beginning, _ in self.memories.disk.values()}
        for root, text in stored:
            before = text[: (len(text) - 1) // PAGE_BYTES * PAGE_BYTES]
            assert not before or (root, before) in stored, "it would lead nowhere after a restart"


Action = Callable[[House, TokenIdentities, int], None]
_OTHERS: list[Action] = [
    House.draft,
    House.hold,
    House.release,
    House.pin,
    House.unpin,
    House.drop,
    House.not_written,
]
_ACTIONS = st.one_of(st.just(House.insert), st.sampled_from(_OTHERS))


@given(
    st.builds(TierCapacity, st.integers(1, 8), st.integers(0, 4), st.integers(0, 6)),
    st.lists(st.tuples(_ACTIONS, prompts(), st.integers(0, 1)), max_size=25),
)
def test_what_is_found_is_what_was_saved_in_any_order_of_things(
    capacity: TierCapacity, actions: list[tuple[Action, TokenIdentities, int]]
) -> None:
    house = House(capacity)
    for act, prompt, client in actions:
        act(house, prompt, client)
        for _, other, _ in actions:
            house.check(other)
    house.memories.do(house.index.unwritten())
    house.index.unpin(0)
    house.index.unpin(1)
    while house.held:
        house.release()
    many = [identities([block]) for block in range(10, 10 + capacity.device)]
    for prompt in many:
        house.insert(prompt)
    found = sum(house.index.match(prompt, PAGE_TOKENS).tokens for prompt in many)
    assert found == PAGE_TOKENS * capacity.device, "whatever was held can leave in the end"
