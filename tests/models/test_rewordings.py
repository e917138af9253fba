from random import Random

import pytest

from models.adapter_stream import short_conversation
from models.evaluate import reworded_prompt
from models.rewordings import careful, reworded, spoken, steps_of
from models.splits import Prompt, in_training

DIM = '{"action":"dim","device":"desk lamp","value":20}'
PLAN = '[{"action":"turn_on","device":"fan"},{"action":"go","device":"rover","room":"hall"}]'


@pytest.mark.parametrize(
    ("answer", "said", "question"),
    [
        (DIM, "OK, dim: desk lamp, 20.", "Shall I dim: desk lamp, 20?"),
        (PLAN, "OK, turn on: fan; go: rover, hall.", "Shall I turn on: fan; go: rover, hall?"),
    ],
)
def test_actions_are_said_in_another_way(answer: str, said: str, question: str) -> None:
    assert spoken(steps_of(answer)) == said
    assert careful(steps_of(answer)) == question


def test_what_is_no_action_and_what_users_say_stay() -> None:
    chat = [
        {"role": "user", "content": DIM},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "dim it"},
        {"role": "assistant", "content": DIM},
    ]
    assert reworded(chat, spoken)[:3] == chat[:3]
    assert reworded(chat, spoken)[3]["content"] == "OK, dim: desk lamp, 20."


def test_a_held_out_prompt_has_earlier_answers_in_the_same_way() -> None:
    prompt = Prompt("lights", [{"role": "assistant", "content": PLAN}], DIM)
    found = reworded_prompt(prompt, careful)
    assert found.messages[0]["content"] == "Shall I turn on: fan; go: rover, hall?"
    assert (found.group, found.expected) == ("lights", "Shall I dim: desk lamp, 20?")


def test_half_of_the_stream_are_actions_and_none_is_held_out() -> None:
    random = Random(3)
    turns = [turn for _ in range(100) for turn in short_conversation(random).turns]
    share = sum(bool(steps_of(turn.answer)) for turn in turns) / len(turns)
    assert 0.4 < share < 0.8
    assert all(map(in_training, turns))
    assert max(len(turn.answer) for turn in turns if not steps_of(turn.answer)) <= 150
