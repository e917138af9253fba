import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.errors import HearthError
from hearth.runtime.text import TextStream, Tokenizer
from tests.runtime.text.folders import byte_level, open_tokenizer
from tests.runtime.text.test_stop import naive


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
    assert (found, stream.stopped) == naive(text, stop)


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
