"""The index beside a plain model of one tier."""

from hypothesis import given
from hypothesis import strategies as st

from hearth.runtime.kv_cache.page_index import PageIndex
from hearth.runtime.kv_cache.pages import PAGE_TOKENS, TOKEN_BYTES, TierCapacity, TokenIdentities
from tests.runtime.kv_cache.prompts import Beginning, beginnings, common, prompts


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
