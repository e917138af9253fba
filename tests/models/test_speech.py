import json
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest

from models.conversations import Conversation
from models.domain import Turn
from models.sentences import Sentence, actions_of, calls_of, is_right, kind_of, strays_of
from models.speech.homes import make_home
from models.speech.talk import speech_conversation, tool_speech
from models.speech.voice import in_words
from models.splits import in_training
from models.stream import START, Row, padded, read_tokenizer, text_of
from models.vocabulary import UNSEEN_WORDS

HOME = Path(__file__).parents[2] / "models" / "home"
SAMPLE = 250


@pytest.fixture(scope="module")
def plain() -> list[Conversation]:
    rng = Random(1)
    return [speech_conversation(rng, in_training) for _ in range(SAMPLE)]


@pytest.fixture(scope="module")
def tooled() -> list[Conversation]:
    rng = Random(2)
    return [tool_speech(rng, in_training) for _ in range(SAMPLE)]


def listed(conversation: Conversation) -> tuple[str, ...]:
    lines = conversation.system.splitlines()
    return tuple(line[2:].partition(" (")[0] for line in lines if line.startswith("- "))


def test_every_action_is_on_a_listed_device(plain: list[Conversation]) -> None:
    acted = 0
    for conversation in plain:
        sentence = Sentence([], (), "refuse", listed(conversation))
        for turn in conversation.turns if sentence.devices else ():
            assert strays_of(turn.answer, sentence) == []
            acted += len(actions_of(turn.answer))
    assert acted > SAMPLE


def test_every_call_keeps_to_its_definition(tooled: list[Conversation]) -> None:
    called = 0
    for conversation in tooled:
        sentence = Sentence([], conversation.tools, "refuse", ("none",))
        names = {json.loads(line)["function"]["name"] for line in conversation.tools}
        for turn in conversation.turns:
            calls = calls_of(turn.answer)
            assert len(turn.results) == len(calls)
            assert {call["name"] for call in calls} <= names
            assert not calls or strays_of(turn.answer, sentence) == []
            called += len(calls)
    assert called > SAMPLE


def test_no_combination_is_held_out_and_no_unseen_word_said(
    plain: list[Conversation], tooled: list[Conversation]
) -> None:
    said: set[str] = set()
    for conversation in (*plain, *tooled):
        assert all(map(in_training, conversation.turns))
        said.update(re.findall(r"[a-z]+", text_of(conversation).lower()))
    assert not said & UNSEEN_WORDS


def test_a_fact_is_given_back_in_the_words_in_which_it_was_told(plain: list[Conversation]) -> None:
    found = 0
    for conversation in plain:
        told = " ".join(turn.user for turn in conversation.turns)
        for turn in conversation.turns:
            if turn.answer.startswith("You said: "):
                assert turn.answer.removeprefix("You said: ").rstrip(".") in told
                found += 1
    assert found > SAMPLE // 20


def test_names_of_a_home_are_distinct() -> None:
    rng = Random(3)
    for _ in range(SAMPLE):
        home = make_home(rng)
        assert len({d.name for d in home.shown}) == len(home.devices) > 0


def test_what_others_answered_is_shown_and_not_learned() -> None:
    first = Turn("tell", "speech", "a", "Noted.", ("", "", ""), (), shown="Okay.")  # type: ignore[arg-type]
    second = first._replace(user="b", shown="", answer="Yes.")
    conversation = Conversation("", (first, second))
    tokenizer = read_tokenizer(HOME)
    row = Row(np.array(tokenizer.encode(text_of(conversation)).ids), conversation.foreign())
    ids, answers = padded([row], tokenizer)
    learned = tokenizer.decode(ids[answers].tolist(), skip_special_tokens=False)
    assert learned == "Yes.<|im_end|>"
    assert "Okay." in text_of(conversation)
    assert START not in learned


@pytest.mark.parametrize(
    ("number", "words"),
    [(7, "seven"), (40, "forty"), (65, "sixty-five"), (230, "two hundred and thirty")],
)
def test_numbers_are_said_in_words(number: int, words: str) -> None:
    assert in_words(number) == words


FETCH = {"action": "fetch", "device": "rover", "item": "cup", "from": "hall", "to": "den"}


def test_a_plan_is_as_good_as_its_errand() -> None:
    plan = [
        ("go", "room", "hall"),
        ("pick", "item", "cup"),
        ("go", "room", "den"),
        ("give", "item", "cup"),
    ]
    steps = [{"action": action, "device": "rover", key: value} for action, key, value in plan]
    assert is_right(json.dumps(steps), FETCH)
    assert is_right(json.dumps(FETCH), FETCH)
    assert not is_right(json.dumps(steps[:3]), FETCH)


def test_a_list_of_devices_names_no_other() -> None:
    home = ("lamp", "fan")
    assert is_right("These are on: lamp.", ["lamp"], home)
    assert not is_right("These are on: lamp, fan.", ["lamp"], home)


def test_what_is_not_listed_is_counted() -> None:
    tool = {
        "function": {"name": "read", "parameters": {"properties": {"room": {"enum": ["hall"]}}}}
    }
    sentence = Sentence(
        [{"role": "user", "content": "hi"}], (json.dumps(tool),), "refuse", ("fan",)
    )
    call = '<tool_call>\n{"name": "read", "arguments": {"room": "den"}}\n</tool_call>'
    assert strays_of('{"action":"turn_on","device":"lamp"}', sentence) == ["lamp"]
    assert strays_of('{"action":"turn_on","device":"fan"}', sentence) == []
    assert strays_of(call, sentence) == ["den"]
    assert kind_of(sentence) == "refuse"
