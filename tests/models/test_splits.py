import re
from collections import Counter
from hashlib import blake2b
from random import Random

import pytest

from models.conversations import render
from models.names import UNSEEN, UNSEEN_WORDS, compose_name
from models.splits import Prompt, held_out, is_held_out
from models.stream import training_conversation

SAMPLE = 400
MEASURED = "100cae98a3a7196c"  # other prompts need new scores in models/README.md


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return held_out()


def test_a_thousand_by_combination_and_two_hundred_by_name(prompts: list[Prompt]) -> None:
    groups = Counter(prompt.group for prompt in prompts)
    assert groups["unseen"] == 200
    assert len(prompts) == 1200


def test_held_out_prompts_are_distinct_and_end_with_a_question(prompts: list[Prompt]) -> None:
    chats = {render(prompt.messages) for prompt in prompts}
    assert len(chats) == len(prompts)
    assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)


def test_unseen_names_stand_in_the_system_prompt(prompts: list[Prompt]) -> None:
    names = [name for group in UNSEEN.values() for name in group]
    for prompt in prompts:
        if prompt.group == "unseen":
            asked = prompt.expected
            listed = [name for name in names if name in asked]
            assert listed
            assert any(name in prompt.messages[0]["content"] for name in listed)


def test_held_out_prompts_are_those_that_the_scores_were_measured_on(
    prompts: list[Prompt],
) -> None:
    digest = blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(repr(prompt).encode())
    assert digest.hexdigest() == MEASURED


def test_training_never_uses_a_held_out_combination() -> None:
    rng = Random(11)
    for _ in range(SAMPLE):
        for turn in training_conversation(rng).turns:
            assert not is_held_out(turn.combination)
            assert not any(map(is_held_out, turn.steps))


def test_training_never_says_an_unseen_word() -> None:
    rng = Random(12)
    said: set[str] = set()
    for _ in range(SAMPLE):
        text = render(training_conversation(rng).messages())
        said.update(re.findall(r"[a-z]+", text.lower()))
    assert not said & UNSEEN_WORDS


def test_composed_names_are_no_unseen_names() -> None:
    rng = Random(13)
    unseen = {name for group in UNSEEN.values() for name in group}
    assert not unseen & {compose_name(rng, kind) for kind in UNSEEN for _ in range(200)}
