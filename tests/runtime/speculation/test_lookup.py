import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.speculation.lookup_proposer import NgramIndex

texts = st.lists(st.integers(0, 2), max_size=40)


def naive(text: list[int], longest: int, shortest: int, count: int) -> list[int]:
    for n in range(min(longest, len(text)), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                grown = list(text)
                for place in range(count):
                    grown.append(grown[end + place])
                return grown[len(text) :]
    return []


@settings(deadline=None)
@given(texts, st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_proposals_equal_those_of_a_plain_search(
    text: list[int], longest: int, shortest: int, count: int
) -> None:
    index = NgramIndex(text, longest, min(shortest, longest))
    assert index.propose(count) == naive(text, longest, min(shortest, longest), count)


@settings(deadline=None)
@given(texts, texts)
def test_appending_in_pieces_is_the_same(first: list[int], second: list[int]) -> None:
    index = NgramIndex(first, 3, 1)
    index.propose(4)
    index.append(second)
    assert index.propose(4) == NgramIndex(first + second, 3, 1).propose(4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], [9, 5]),  # the longer occurrence, although older
        ([2, 3, 7, 2, 3, 8, 4, 2, 3], [8, 4]),  # of equal ones the latest
        ([5, 3, 7, 6, 3], []),  # one token alone is below the shortest
        ([4, 4, 4], [4, 4]),  # the occurrence overlaps the newest tokens
        ([1, 2, 3, 4], []),
        ([], []),
    ],
)
def test_the_longest_then_latest_occurrence_goes_on(text: list[int], expected: list[int]) -> None:
    assert NgramIndex(text, 3, 2).propose(2) == expected


def test_a_repetition_is_proposed_to_go_on_repeating() -> None:
    assert NgramIndex([9, 1, 2, 3, 1, 2], 2, 2).propose(7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_token_adds_at_most_as_many_nodes_as_the_longest_match() -> None:
    rng = random.Random(0)
    text = [rng.randrange(50_000) for _ in range(2_000)]
    index = NgramIndex(text, 3, 2)
    assert len(index._children) <= 3 * len(text)
