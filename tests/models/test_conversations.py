import json
from pathlib import Path
from random import Random

import jinja2

from models.conversations import random_conversation, render
from models.splits import in_training

TEMPLATE = Path(__file__).parents[2] / "models" / "home" / "chat_template.jinja"


def test_the_same_seed_gives_the_same_conversation() -> None:
    first, second = (random_conversation(Random(5), in_training) for _ in range(2))
    assert first == second


def test_turns_alternate_after_the_system_prompt() -> None:
    rng = Random(6)
    for _ in range(50):
        roles = [m["role"] for m in random_conversation(rng, in_training).messages()]
        spoken = roles[1:] if roles[0] == "system" else roles
        assert spoken == ["user", "assistant"] * (len(spoken) // 2)


def test_json_answers_are_compact_and_name_the_action_first() -> None:
    rng = Random(7)
    answers = [
        turn.answer
        for _ in range(100)
        for turn in random_conversation(rng, in_training).turns
        if turn.answer[0] in "{["
    ]
    assert answers
    for answer in answers:
        value = json.loads(answer)
        assert json.dumps(value, separators=(",", ":"), ensure_ascii=False) == answer
        steps = value if isinstance(value, list) else [value]
        assert all(next(iter(step)) == "action" for step in steps)


def test_a_stated_fact_is_answered_later() -> None:
    rng = Random(8)
    for _ in range(300):
        turns = random_conversation(rng, in_training).turns
        for index, turn in enumerate(turns):
            if turn.intent == "ask_code":
                told = [t.combination.value for t in turns[:index] if t.intent == "tell_code"]
                assert turn.combination.value in told


def test_the_shipped_template_renders_as_training_did() -> None:
    plain = jinja2.Environment(autoescape=False)  # noqa: S701 - a prompt is no web page
    template = plain.from_string(TEMPLATE.read_text("utf-8"))
    messages = [
        {"role": "system", "content": "You control a home."},
        {"role": "user", "content": "hello"},
    ]
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text == render(messages, prompt=True)
