import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.errors import HearthError
from hearth.runtime.text.stream import StopMatcher

# Two letters, so that stop strings overlap one another and themselves all the time.
texts = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def run(matcher: StopMatcher, parts: list[str]) -> str:
    return "".join([*map(matcher.push, parts), matcher.finish()])


def naive(text: str, stop: list[str]) -> tuple[str, bool]:
    starts = [text.find(s) for s in stop if s in text]
    return (text[: min(starts)], True) if starts else (text, False)


def split(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@settings(deadline=None)
@given(texts, stops, st.lists(st.integers(0, 30), max_size=30))
def test_any_split_is_cut_like_the_whole_text(text: str, stop: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stop)
    assert (run(matcher, split(text, cuts)), matcher.matched) == naive(text, stop)


@settings(deadline=None)
@given(texts, stops)
def test_text_is_held_back_only_while_it_may_become_a_match(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    released = ""
    for end, letter in enumerate(text, 1):
        released += matcher.push(letter)
        if matcher.matched:
            return
        rest = text[len(released) : end]
        assert not rest or any(s.startswith(rest) or s in rest for s in stop)


def test_without_stop_strings_everything_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("hello") == "hello"
    assert matcher.finish() == ""
    assert not matcher.matched


def test_the_earliest_match_wins_even_when_a_later_one_is_complete_first() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.push("xab") == "x"
    assert matcher.push("c") == ""
    assert not matcher.matched
    assert matcher.push("d") == ""
    assert matcher.matched


def test_a_later_match_counts_once_the_earlier_one_is_impossible() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.push("xabc") == "x"
    assert matcher.push("x") == "a"
    assert matcher.matched


def test_a_match_that_waited_counts_at_the_end() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert run(matcher, ["xabc"]) == "xa"
    assert matcher.matched


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("one\n\ntwo") == "one"
    assert matcher.push("three") == ""
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(HearthError) as caught:
        StopMatcher(["a", ""])
    assert (caught.value.code, caught.value.field) == ("invalid_value", "stop")
