import json
import re
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from random import Random

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer

from models.conversations import KINDS, random_conversation, render
from models.domain import Turn
from models.evaluate import reworded_prompt
from models.intents import INTENTS
from models.rewordings import careful, reworded, short_conversation, spoken, steps_of
from models.splits import Prompt, held_out, in_training, is_held_out
from models.stream import answer_mask, batches, training_conversation
from models.vocabulary import PLURALS, ROOMS, SEEN, UNSEEN, UNSEEN_WORDS, compose_name

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


SAMPLE = 400
MEASURED = "904cb015a51a3462"  # other prompts need new scores in models/README.md


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


TOKENIZER = Tokenizer.from_file(
    str(Path(__file__).parents[2] / "models" / "home" / "tokenizer.json")
)


def test_only_answers_and_their_ends_are_learned() -> None:
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    ids = np.array(TOKENIZER.encode(text).ids)
    learned = ids[answer_mask(ids, TOKENIZER)].tolist()
    assert TOKENIZER.decode(learned, skip_special_tokens=False) == "hi<|im_end|>"


def test_batches_keep_to_the_budget_and_to_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.stream.POOL", 32)
    first, second = (next(batches(TOKENIZER, 4, 2048)) for _ in range(2))
    assert np.array_equal(first.ids, second.ids)
    assert first.ids.shape == first.answers.shape
    assert first.answers.any(axis=1).all()


def _of_a_room(turns: list[Turn]) -> float:
    found = [
        turn
        for turn in turns
        if turn.group in {"questions", "scenes"} and turn.combination.device in ROOMS
    ]
    return len(found) / len(turns)


def _is_speech(turn: Turn) -> bool:
    return turn.intent.startswith("speech:")


def test_the_stream_asks_more_often_about_the_devices_of_a_room() -> None:
    rng = Random(14)
    plain = [turn for _ in range(200) for turn in random_conversation(rng, in_training).turns]
    made = [training_conversation(rng).turns for _ in range(800)]
    mixed = [turn for turns in made if not any(map(_is_speech, turns)) for turn in turns]
    assert _of_a_room(mixed) > 1.5 * _of_a_room(plain)
    assert len({turn.intent for turn in mixed}) > 80


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
    assert 0.3 < share < 0.8
    assert all(map(in_training, turns))
    assert max(len(turn.answer) for turn in turns if not steps_of(turn.answer)) <= 150


def test_at_least_forty_intents_with_five_phrasings_each() -> None:
    assert len(INTENTS) >= 40
    assert all(len(set(intent.phrasings)) >= 5 for intent in INTENTS)


def test_names_of_intents_are_distinct() -> None:
    assert len({intent.name for intent in INTENTS}) == len(INTENTS)


def test_at_least_two_hundred_seen_names_all_distinct() -> None:
    names = [name for group in SEEN.values() for name in group]
    assert len(names) >= 200
    assert len(set(names)) == len(names)


def test_every_kind_has_seen_and_unseen_names_and_a_plural() -> None:
    assert tuple(SEEN) == tuple(UNSEEN) == KINDS == tuple(PLURALS)


def test_every_unseen_name_has_an_unseen_word() -> None:
    names = [name for group in UNSEEN.values() for name in group]
    assert all(UNSEEN_WORDS & set(name.split()) for name in names)


def test_every_slot_of_a_phrasing_is_filled() -> None:
    for intent in INTENTS:
        slots = {key: "x" for key, _ in intent.slots}
        assert all(phrasing.format(**slots) for phrasing in intent.phrasings)
