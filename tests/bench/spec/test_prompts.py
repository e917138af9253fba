from pathlib import Path

import pytest

from bench.spec import prompts
from bench.spec.prompts import Prompt, Turn, encode_prompts, held_out_prompts, spread
from runtime.errors import HearthError
from runtime.text import Tokenizer
from tests.runtime.text.folders import byte_level, open_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return open_tokenizer(tmp_path, byte_level())


def prompt(group: str) -> Prompt:
    return Prompt(group, [Turn("user", group)])


def test_prompts_are_conversations_that_end_with_a_question() -> None:
    found = held_out_prompts(24)
    assert len(found) == 24
    assert len({one.group for one in found}) > 5
    for one in found:
        assert one.messages[-1].role == "user"


def test_prompts_are_taken_at_even_distances() -> None:
    groups = [prompt(str(number)) for number in range(10)]
    assert [one.group for one in spread(groups, 4)] == ["0", "2", "5", "7"]
    assert spread(groups, 99) == groups


def test_prompts_get_the_chat_template(tokenizer: Tokenizer) -> None:
    (found,) = encode_prompts([prompt("hi")], tokenizer)
    assert found == tokenizer.encode_chat([("user", "hi")])


def test_without_the_program_the_place_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "SOURCE", tmp_path / "models" / "home")
    with pytest.raises(HearthError, match="no prompts at"):
        held_out_prompts(1)
