"""The index beside plain models of it, under all that may be asked in any order."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.page_index import MOST_WRITES, PINS_FULL, PageIndex
from hearth.runtime.kv_cache.pages import (
    PAGE_TOKENS,
    TOKEN_BYTES,
    Change,
    Erase,
    Move,
    Page,
    Place,
    Save,
    Stored,
    TierCapacity,
    TokenIdentities,
    Write,
)
from tests.runtime.kv_cache.prompts import (
    ROOTS,
    Beginning,
    beginnings,
    common,
    identities,
    ids,
    prompts,
)

COMMON = [1, 2]


def insert(index: PageIndex, blocks: list[int], rest: int = 0, draft: int = 0) -> list[Change]:
    prompt = identities(blocks, rest)
    return index.insert(prompt, len(prompt), draft)


def found(index: PageIndex, blocks: list[int], rest: int = 0) -> int:
    prompt = identities(blocks, rest)
    return index.match(prompt, len(prompt)).tokens


def saved(changes: list[Change]) -> list[tuple[int, Place]]:
    return [(one.first, one.place) for one in changes if isinstance(one, Save)]


def test_only_pages_that_are_not_there_are_saved() -> None:
    index = PageIndex(TierCapacity(8))
    assert saved(insert(index, COMMON)) == [(0, Place("device", 0)), (32, Place("device", 1))]
    assert saved(insert(index, [*COMMON, 3])) == [(64, Place("device", 2))]
    assert insert(index, COMMON) == []


def test_a_match_is_the_longest_beginning_also_within_a_page() -> None:
    index = PageIndex(TierCapacity(8))
    insert(index, [*COMMON, 3])
    insert(index, [*COMMON, 4])
    prompt = TokenIdentities(ROOTS[0], [*ids(COMMON), *[4] * 20, *[5] * 12])
    match = index.match(prompt, len(prompt))
    assert match.tokens == 84
    assert [page.length for page in match.pages] == [32, 32, 32]
    assert match.pages[-1].tokens == prompt.between(64, 65) * 32
    assert index.match(prompt, 83).tokens == 83
    assert (match.cut(64).pages, match.cut(64).tokens) == (match.pages[:2], 64)
    assert match.cut(65).pages == match.pages


def test_nothing_is_shared_between_adapters() -> None:
    index = PageIndex(TierCapacity(8))
    insert(index, COMMON)
    assert index.match(identities(COMMON, root=ROOTS[1]), 64).tokens == 0


def test_a_last_page_that_is_not_full_makes_place_for_what_goes_on_from_it() -> None:
    index = PageIndex(TierCapacity(8))
    insert(index, COMMON, 5)
    assert found(index, COMMON, 20) == 69
    assert insert(index, COMMON, 3) == []
    # It lay in slot 2, which is free when the page that begins alike is saved.
    assert saved(insert(index, COMMON, 20)) == [(64, Place("device", 2))]
    assert len(index) == 3
    assert found(index, COMMON, 31) == 84


def test_a_page_that_somebody_reads_stays_when_another_goes_on_from_it() -> None:
    index = PageIndex(TierCapacity(8))
    insert(index, COMMON, 5)
    pages = index.match(identities(COMMON, 5), 69).pages
    index.hold(pages)
    assert saved(insert(index, COMMON, 20)) == [(64, Place("device", 3))]
    assert pages[-1].place == Place("device", 2)
    index.release(pages)


def test_what_was_not_used_for_the_longest_time_goes_first_and_leaves_before_their_parents() -> (
    None
):
    index = PageIndex(TierCapacity(4))
    insert(index, [1, 2])
    insert(index, [1, 3, 4])
    insert(index, [1, 2])
    insert(index, [5])
    assert [found(index, [1, 2]), found(index, [1, 3, 4]), found(index, [5])] == [64, 64, 32]
    insert(index, [5, 6, 7])
    assert [found(index, [1, 2]), found(index, [5, 6, 7])] == [32, 96]
    assert index.evicted == 3


def test_a_prompt_with_more_pages_than_there_is_room_keeps_its_beginning() -> None:
    index = PageIndex(TierCapacity(3))
    insert(index, [1, 2, 3, 4, 5])
    assert found(index, [1, 2, 3, 4, 5]) == 96
    assert PageIndex(TierCapacity(0)).insert(identities([1]), 32) == []


def test_what_leaves_the_device_goes_to_host_memory_and_comes_back_from_the_row() -> None:
    index = PageIndex(TierCapacity(1, 1))
    insert(index, [1])
    page = index.match(identities([1]), 32).pages[0]
    move, save = insert(index, [2])
    assert move == Move(page, Place("device", 0), Place("host", 0))
    assert isinstance(save, Save)
    assert index.match(identities([1]), 32).pages == (page,)
    assert page.tier == "host"
    insert(index, [1])
    assert (page.tier, index.held_in("host"), len(index)) == ("device", 0, 1)


def test_a_page_held_between_look_up_and_loading_stays_where_it_is() -> None:
    index = PageIndex(TierCapacity(1))
    insert(index, [1])
    match = index.match(identities([1]), 32)
    index.hold(match.pages)
    assert insert(index, [2]) == []
    index.release(match.pages)
    assert len(insert(index, [2])) == 1
    assert match.pages[0].tier is None
    assert found(index, [1]) == 0


def test_draft_state_is_noted_by_page_and_added_later() -> None:
    index = PageIndex(TierCapacity(8))
    prompt = identities([1, 2, 3])
    index.insert(prompt, 96, draft=63)
    assert index.match(prompt, 96).draft == 32
    (added,) = index.insert(prompt, 96, draft=64)
    assert isinstance(added, Save)
    assert (added.first, added.base, added.draft) == (32, False, True)
    match = index.match(prompt, 96)
    assert (match.tokens, match.draft, match.cut(40).draft) == (96, 64, 40)


def test_what_has_draft_state_keeps_it_when_a_row_without_brings_it_back() -> None:
    index = PageIndex(TierCapacity(2, 3))
    insert(index, [1, 2], draft=64)
    insert(index, [3, 4])
    (page,) = index.match(identities([1]), 32).pages
    assert insert(index, [1])[-1] == Move(page, Place("host", 1), Place("device", 0))
    assert page.tier == "device"
    assert index.match(identities([1, 2]), 64).draft == 64


def test_draft_state_behind_a_page_without_is_of_no_use() -> None:
    index = PageIndex(TierCapacity(2, 0, 4))
    insert(index, [1, 2], draft=64)
    insert(index, [3, 4])
    assert [type(one) for one in insert(index, [1])] == [Write, Write, Save]
    assert index.match(identities([1, 2]), 64).draft == 0
    insert(index, [5, 6])
    assert index.match(identities([1, 2]), 64).draft == 64


def test_a_row_that_cannot_be_saved_or_read_takes_along_what_is_behind_it() -> None:
    index = PageIndex(TierCapacity(4, 0, 4))
    insert(index, [1, 2, 3])
    match = index.match(identities([1, 2, 3]), 96)
    index.hold(match.pages)
    assert index.drop(match.pages[1]) == []
    assert found(index, [1, 2, 3]) == 32
    index.release(match.pages)
    assert index.held_in("device") == 1
    assert index.drop(match.pages[2]) == []


def test_pins_hold_pages_that_are_there_and_those_that_come() -> None:
    index = PageIndex(TierCapacity(8))
    insert(index, [1])
    index.pin(7, identities([1, 2], 5), 69)
    insert(index, [1, 2], 5)
    for block in range(10, 20):
        insert(index, [block])
    assert (found(index, [1, 2], 5), index.pinned) == (64, 2)
    index.unpin(7)
    for block in range(10, 20):
        insert(index, [block])
    assert (found(index, [1]), index.pinned) == (0, 0)


def test_a_client_pins_a_quarter_at_most_and_all_of_them_three() -> None:
    index = PageIndex(TierCapacity(8))
    index.pin(1, identities([1, 2]), 64)
    index.pin(1, identities([1, 2]), 64)
    with pytest.raises(HearthError) as caught:
        index.pin(1, identities([1, 3]), 64)
    assert (caught.value.code, caught.value.field) == ("cache_full", "cache")
    index.pin(2, identities([1, 3]), 64)
    index.pin(3, identities([4, 5]), 64)
    index.pin(4, identities([6]), 32)
    with pytest.raises(HearthError, match="of the 6 that all clients may pin 0 are left") as caught:
        index.pin(4, identities([7]), 32)
    assert (caught.value.code, caught.value.field) == PINS_FULL
    index.unpin(1)
    # The page before both is kept by the second client still.
    assert index.pinned == 5
    index.pin(4, identities([7]), 32)


def test_what_leaves_memory_is_written_behind_what_is_before_it() -> None:
    index = PageIndex(TierCapacity(3, 0, 3))
    insert(index, [1, 2, 3])
    path = index.match(identities([1, 2, 3]), 96).pages
    changes = insert(index, [4])
    assert [type(one) for one in changes] == [Write, Write, Write, Save]
    assert [one.page for one in changes if isinstance(one, Write)] == list(path)
    assert [page.tier for page in path] == ["device", "device", "disk"]
    assert found(index, [1, 2, 3]) == 96
    # Nothing is written twice, and the disk keeps what was written last.
    assert [type(one) for one in insert(index, [4, 5])] == [Save]
    changes = insert(index, [4, 5, 6])
    assert [type(one) for one in changes] == [Save]
    changes = insert(index, [7])
    assert [type(one) for one in changes] == [Erase, Write, Erase, Write, Erase, Write, Save]
    assert [found(index, [1]), index.evicted] == [0, 3]


def test_a_page_that_gets_draft_state_is_written_again_when_it_leaves() -> None:
    index = PageIndex(TierCapacity(1, 0, 2))
    insert(index, [1])
    index.unwritten()
    insert(index, [1], draft=32)
    assert [type(one) for one in insert(index, [2])] == [Write, Save]
    match = index.match(identities([1]), 32)
    assert (match.draft, match.pages[0].tier) == (32, "disk")


def test_few_pages_are_written_for_one_that_leaves() -> None:
    index = PageIndex(TierCapacity(MOST_WRITES + 2, 0, 99))
    long = list(range(MOST_WRITES + 2))
    insert(index, long)
    changes = insert(index, [99])
    assert len(changes) == MOST_WRITES + 1
    assert found(index, long) == 32 * (MOST_WRITES + 1)
    insert(index, [98])
    assert found(index, long) == 32 * (MOST_WRITES + 1)


def test_what_could_not_be_written_is_gone_with_what_is_behind_it() -> None:
    index = PageIndex(TierCapacity(2, 0, 4))
    insert(index, [1, 2])
    insert(index, [3])
    path = index.match(identities([1, 2]), 64).pages
    assert index.not_written(path[0]) == [Erase(path[1].name), Erase(path[0].name)]
    assert (found(index, [1, 2]), index.held_in("disk")) == (32, 0)


def test_at_the_end_what_was_used_last_is_written_and_begins_anew() -> None:
    index = PageIndex(TierCapacity(4, 0, 3))
    insert(index, [1, 2])
    insert(index, [1, 3])
    insert(index, [4])
    changes = index.unwritten()
    written = [one.page for one in changes if isinstance(one, Write)]
    assert [found(index, [1, 3]), len(written)] == [64, 3]
    stored = [
        Stored(
            ROOTS[0], page.parent.name if page.parent is not None else b"", page.tokens, False, used
        )
        for used, page in enumerate(written)
    ]
    fresh = PageIndex(TierCapacity(4, 0, 3))
    assert fresh.adopt(stored[::-1]) == []
    assert [found(fresh, blocks) for blocks in ([1, 2], [1, 3], [4])] == [32, 64, 32]
    assert fresh.match(identities([1, 3]), 64).pages[1].tier == "disk"


def test_pages_on_disk_that_lead_nowhere_or_are_too_many_are_erased() -> None:
    names = identities([1, 2, 3, 4]).page_names(128)
    parents = [ROOTS[0], *names]
    stored = [
        Stored(
            ROOTS[0],
            parents[place],
            identities([1, 2, 3, 4]).between(32 * place, 32 * place + 32),
            True,
            used,
        )
        for place, used in [(0, 1.0), (1, 2.0), (3, 9.0)]
    ]
    other = Stored(ROOTS[1], ROOTS[1], identities([5]).between(0, 32), False, 1.5)
    index = PageIndex(TierCapacity(4, 0, 2))
    erased = index.adopt([*stored, other])
    assert erased == [Erase(names[3]), Erase(identities([5], root=ROOTS[1]).page_names(32)[0])]
    match = index.match(identities([1, 2, 3, 4]), 128)
    assert (match.tokens, match.draft) == (64, 64)


def test_long_prompts_are_walked_without_recursion() -> None:
    index = PageIndex(TierCapacity(3000))
    prompt = TokenIdentities(ROOTS[0], range(3000 * PAGE_TOKENS))
    index.insert(prompt, len(prompt))
    match = index.match(prompt, len(prompt))
    assert match.tokens == len(prompt)
    index.drop(match.pages[0])
    assert len(index) == index.held_in("device") == 0


class PlainModel:
    """One tier: beginnings of prompts, the one used last at the end."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.kept: list[Beginning] = []

    def match(self, prompt: TokenIdentities, most: int) -> int:
        own = prompt.between(0, most)
        return max(
            (common(own, text) for root, text in self.kept if root == prompt.root), default=0
        )

    def insert(self, prompt: TokenIdentities, count: int) -> None:
        path: list[Beginning] = []
        for root, text in beginnings(prompt, count):
            page = len(text) - len(path[-1][1]) if path else len(text)
            longer = [
                one
                for one in self.kept
                if one[0] == root
                and one[1].startswith(text)
                and len(one[1]) - (len(text) - page) <= PAGE_TOKENS * TOKEN_BYTES
            ]
            if not longer:
                for one in self.kept:
                    if (
                        one[0] == root
                        and text.startswith(one[1])
                        and len(one[1]) > len(text) - page
                    ):
                        self.kept.remove(one)
                        break
                if len(self.kept) >= self.room:
                    idle = [one for one in self.kept if one not in path]
                    if not idle:
                        break
                    self.kept.remove(idle[0])
            path.append(longer[0] if longer else (root, text))
            if not longer:
                self.kept.append((root, text))
        self.kept = [one for one in self.kept if one not in path] + path[::-1]


@given(st.integers(0, 6), st.lists(st.tuples(prompts(), st.integers(0, 4)), max_size=12))
def test_it_keeps_what_a_plain_model_keeps(
    room: int, rows: list[tuple[TokenIdentities, int]]
) -> None:
    index, model = PageIndex(TierCapacity(room)), PlainModel(room)
    for prompt, less in rows:
        count = max(len(prompt) - less, 0)
        index.insert(prompt, count)
        model.insert(prompt, count)
        assert index.held_in("device") == len(index) == len(model.kept)
        for other, _ in rows:
            assert index.match(other, len(other)).tokens == model.match(other, len(other))


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
