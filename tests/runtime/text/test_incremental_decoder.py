from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.text.stream import IncrementalDecoder
from tests.runtime.text.folders import byte_fallback, byte_level

Decode = Callable[[list[int]], str]
BYTE_LEVEL: Decode = byte_level().decode
BYTE_FALLBACK: Decode = byte_fallback().decode
FALLBACK_LIBRARY = byte_fallback()
# Characters of 1 to 4 bytes, and sequences of several that show as one.
words = st.sampled_from(["the ", "é", "你好", "🙂", "👩‍👩‍👧", "🇩🇪", " ", "x\ufffd", "\n"])


def run(decode: Decode, ids: list[int]) -> list[str]:
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
    assert "".join(run(BYTE_LEVEL, ids)) == BYTE_LEVEL(ids)


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_byte_level_text_of_any_bytes(data: bytes) -> None:
    parts = run(BYTE_LEVEL, raw_bytes(data))
    assert "".join(parts) == data.decode("utf-8", "replace")


@settings(deadline=None)
@given(st.lists(words, max_size=25).map("".join))
def test_byte_fallback_text_of_any_valid_text(text: str) -> None:
    ids = FALLBACK_LIBRARY.encode(text).ids
    assert "".join(run(BYTE_FALLBACK, ids)) == BYTE_FALLBACK(ids)


@pytest.mark.parametrize("decode", [BYTE_LEVEL, BYTE_FALLBACK])
def test_a_character_is_released_with_its_last_token(decode: Decode) -> None:
    library = byte_level() if decode is BYTE_LEVEL else FALLBACK_LIBRARY
    ids = library.encode("x🦊", add_special_tokens=False).ids
    parts = run(decode, ids)
    assert parts[-2] == "🦊"
    assert "".join(parts) == "x🦊"
    assert all("\ufffd" not in part for part in parts)


def test_a_character_that_is_cut_shows_at_the_end_alone() -> None:
    parts = run(BYTE_LEVEL, raw_bytes("ab🙂".encode()[:-1]))
    assert parts == ["a", "b", "", "", "", "\ufffd"]


def test_a_flood_of_invalid_bytes_is_released_and_keeps_the_window_short() -> None:
    widest = 0

    def decode(ids: list[int]) -> str:
        nonlocal widest
        widest = max(widest, len(ids))
        return BYTE_LEVEL(ids)

    parts = run(decode, raw_bytes(b"\xff" * 300))
    assert "".join(parts) == "\ufffd" * 300
    assert all(len("".join(parts[:count])) >= count - 20 for count in range(300))
    assert widest < 30


def test_a_broken_run_of_byte_tokens_does_not_stop_the_text() -> None:
    start = 3
    run_of_bytes = [start + byte for byte in "你".encode() + b"\xff"]
    ids = run_of_bytes + FALLBACK_LIBRARY.encode("the heather " * 10, add_special_tokens=False).ids
    parts = run(BYTE_FALLBACK, ids)
    assert "".join(parts[:3]) == "你"
    assert "".join(parts).endswith(" the heather" * 9 + " ")
    assert parts[-3]
