import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.errors import HearthError
from hearth.runtime.text.stream import IncrementalDecoder, StopMatcher, TextStream, TokenBytes
from hearth.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.folders import byte_fallback, byte_level, open_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(tmp_path_factory.mktemp("engine"), byte_level())


def run(stream: TextStream, ids: list[int]) -> str:
    return "".join([*map(stream.push, ids), stream.finish()])


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=60))
def test_the_stream_adds_up_to_the_full_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert run(TextStream(tokenizer), ids) == tokenizer.decode(ids)


@settings(deadline=None)
@given(
    text=st.text("ab é🙂\n", max_size=30),
    stop=st.lists(st.text("ab é🙂\n", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_like_the_whole_text(
    tokenizer: Tokenizer, text: str, stop: list[str]
) -> None:
    stream = TextStream(tokenizer, stop)
    found = run(stream, tokenizer.encode(text))
    assert (found, stream.stop_string) == naive(text, stop)


def test_special_tokens_do_not_show(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b<|endoftext|>")
    assert run(TextStream(tokenizer), ids) == "ab"


def test_a_character_may_continue_behind_a_special_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦊")
    assert run(TextStream(tokenizer), [*ids[:2], 1, *ids[2:]]) == "🦊"


def test_a_stop_string_across_tokens_does_not_leak(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["kitchen"])
    parts = [stream.push(i) for i in tokenizer.encode("the lamp in the kitchen is on")]
    assert "".join(parts) == "the lamp in the "
    assert stream.stopped
    assert stream.finish() == ""


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(HearthError, match="stop"):
        TextStream(tokenizer, [""])


# Two letters, so that stop strings overlap one another and themselves all the time.
texts = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def pushed(matcher: StopMatcher, parts: list[str]) -> str:
    return "".join([*map(matcher.push, parts), matcher.finish()])


def naive(text: str, stop: list[str]) -> tuple[str, str | None]:
    found = min(((text.find(s), len(s), s) for s in stop if s in text), default=None)
    return (text, None) if found is None else (text[: found[0]], found[2])


def split(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@settings(deadline=None)
@given(texts, stops, st.lists(st.integers(0, 30), max_size=30))
def test_any_split_is_cut_like_the_whole_text(text: str, stop: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stop)
    assert (pushed(matcher, split(text, cuts)), matcher.matched) == naive(text, stop)


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
    assert pushed(matcher, ["xabc"]) == "xa"
    assert matcher.matched


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("one\n\ntwo") == "one"
    assert matcher.push("three") == ""
    assert matcher.finish() == ""


def test_a_matcher_takes_no_empty_stop_string() -> None:
    with pytest.raises(HearthError) as caught:
        StopMatcher(["a", ""])
    assert (caught.value.code, caught.value.field) == ("invalid_value", "stop")


Decode = Callable[[list[int]], str]
BYTE_LEVEL: Decode = byte_level().decode
BYTE_FALLBACK: Decode = byte_fallback().decode
FALLBACK_LIBRARY = byte_fallback()
# Characters of 1 to 4 bytes, and sequences of several that show as one.
words = st.sampled_from(["the ", "é", "你好", "🙂", "👩‍👩‍👧", "🇩🇪", " ", "x\ufffd", "\n"])


def decoded(decode: Decode, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(decode)
    return [*map(decoder.push, ids), decoder.finish()]


def raw_bytes(data: bytes) -> list[int]:
    """One token for each byte of a byte-level vocabulary."""
    library = byte_level()
    return [library.model.tokenize(chr(c))[0].id for c in map(_byte_letter, data)]


def _byte_letter(byte: int) -> int:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return byte if byte in printable else 256 + others.index(byte)


@settings(deadline=None)
@given(st.lists(st.integers(3, 349), max_size=60))
def test_byte_level_text_is_the_full_decoding_of_any_ids(ids: list[int]) -> None:
    assert "".join(decoded(BYTE_LEVEL, ids)) == BYTE_LEVEL(ids)


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_byte_level_text_of_any_bytes(data: bytes) -> None:
    parts = decoded(BYTE_LEVEL, raw_bytes(data))
    assert "".join(parts) == data.decode("utf-8", "replace")


@settings(deadline=None)
@given(st.lists(words, max_size=25).map("".join))
def test_byte_fallback_text_of_any_valid_text(text: str) -> None:
    ids = FALLBACK_LIBRARY.encode(text).ids
    assert "".join(decoded(BYTE_FALLBACK, ids)) == BYTE_FALLBACK(ids)


@pytest.mark.parametrize("decode", [BYTE_LEVEL, BYTE_FALLBACK])
def test_a_character_is_released_with_its_last_token(decode: Decode) -> None:
    library = byte_level() if decode is BYTE_LEVEL else FALLBACK_LIBRARY
    ids = library.encode("x🦊", add_special_tokens=False).ids
    parts = decoded(decode, ids)
    assert parts[-2] == "🦊"
    assert "".join(parts) == "x🦊"
    assert all("\ufffd" not in part for part in parts)


def test_a_character_that_is_cut_shows_at_the_end_alone() -> None:
    parts = decoded(BYTE_LEVEL, raw_bytes("ab🙂".encode()[:-1]))
    assert parts == ["a", "b", "", "", "", "\ufffd"]


def test_a_flood_of_invalid_bytes_is_released_and_keeps_the_window_short() -> None:
    widest = 0

    def decode(ids: list[int]) -> str:
        nonlocal widest
        widest = max(widest, len(ids))
        return BYTE_LEVEL(ids)

    parts = decoded(decode, raw_bytes(b"\xff" * 300))
    assert "".join(parts) == "\ufffd" * 300
    assert all(len("".join(parts[:count])) >= count - 20 for count in range(300))
    assert widest < 30


def test_a_broken_run_of_byte_tokens_does_not_stop_the_text() -> None:
    start = 3
    run_of_bytes = [start + byte for byte in "你".encode() + b"\xff"]
    ids = run_of_bytes + FALLBACK_LIBRARY.encode("the heather " * 10, add_special_tokens=False).ids
    parts = decoded(BYTE_FALLBACK, ids)
    assert "".join(parts[:3]) == "你"
    assert "".join(parts).endswith(" the heather" * 9 + " ")
    assert parts[-3]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", ["the lamp", " a  b", "🦊é"])
def test_the_bytes_of_tokens_are_those_of_their_text(
    make: Callable[[], tokenizers.Tokenizer], text: str, tmp_path: Path
) -> None:
    tokenizer = open_tokenizer(tmp_path, make())
    spelt = TokenBytes(tokenizer)
    ids = filter(tokenizer.has_text, tokenizer.encode(text))
    found = b"".join(map(spelt.of, ids))
    assert found.decode().strip() == text.strip()


def test_a_special_token_is_its_spelling(tokenizer: Tokenizer) -> None:
    (special, *_) = tokenizer.special_in("<|im_end|>")
    assert TokenBytes(tokenizer).of(special) == b"<|im_end|>"
    assert TokenBytes(tokenizer).of(tokenizer.vocab_size + 5) == b""
