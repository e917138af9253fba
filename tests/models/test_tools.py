import json
from pathlib import Path
from random import Random

import jinja2
import pytest

from models.conversations import Conversation, Message, render
from models.sentences import calls_of, is_right, read_sentences
from models.splits import held_out_with_tools, in_training, is_held_out
from models.stream import MARKERS, read_tokenizer, training_conversation
from models.tool_families import FAMILIES, Family
from models.tools import (
    NO_TOOL,
    as_call,
    family_turn,
    make_tool,
    tool_conversation,
)

HOME = Path(__file__).parents[2] / "models" / "home"


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    rng = Random(1)
    return [tool_conversation(rng, in_training, in_training) for _ in range(150)]


def defined(conversation: Conversation) -> dict[str, list[str]]:
    """The names of tools with those of their parameters."""
    functions = [json.loads(line)["function"] for line in conversation.tools]
    schemas = {one["name"]: one.get("parameters", {}) for one in functions}
    return {name: list(schema.get("properties", {})) for name, schema in schemas.items()}


def test_calls_have_names_and_parameters_of_the_definitions(
    conversations: list[Conversation],
) -> None:
    called = 0
    for conversation in conversations:
        known = defined(conversation)
        for turn in conversation.turns:
            for call in calls_of(turn.answer):
                assert set(call["arguments"]) <= set(known[call["name"]])
                called += 1
    assert called > len(conversations)


def test_a_result_and_a_reply_follow_each_call(conversations: list[Conversation]) -> None:
    for turn in (turn for one in conversations for turn in one.turns):
        assert len(turn.results) == len(calls_of(turn.answer))
        assert bool(turn.results) == bool(turn.reply)


def test_listed_values_are_what_the_call_says(conversations: list[Conversation]) -> None:
    for conversation in conversations:
        shapes = {
            function["name"]: function.get("parameters", {}).get("properties", {})
            for function in (json.loads(line)["function"] for line in conversation.tools)
        }
        for turn in conversation.turns:
            for call in calls_of(turn.answer):
                for name, value in call["arguments"].items():
                    assert value in shapes[call["name"]][name].get("enum", [value])


def test_some_requests_have_no_tool(conversations: list[Conversation]) -> None:
    answers = [turn.answer for one in conversations for turn in one.turns]
    assert answers.count(NO_TOOL) > 10


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.names[0])
def test_every_request_says_the_values_of_its_call(family: Family) -> None:
    rng = Random(3)
    for _ in range(20):
        turn = family_turn(rng, make_tool(rng, family))
        assert turn is not None
        (call,) = calls_of(turn.answer)
        assert all(str(value).lower() in turn.user.lower() for value in call["arguments"].values())
        assert not {"%", "{0}", "{1}"} & set(turn.reply.split())


def test_tool_conversations_are_trained_on_without_what_is_held_out() -> None:
    rng = Random(4)
    found = [training_conversation(rng) for _ in range(150)]
    assert 20 < sum(bool(one.tools) for one in found) < 80
    assert all(in_training(turn) for one in found for turn in one.turns)


def test_prompts_with_tools_are_held_out() -> None:
    prompts = held_out_with_tools()
    assert len(prompts) == 300
    assert all(prompt.tools and prompt.messages[-1]["role"] != "assistant" for prompt in prompts)
    assert len({render(prompt.messages, prompt.tools) for prompt in prompts}) == len(prompts)
    rng = Random(5)
    turns = [turn for _ in range(50) for turn in training_conversation(rng).turns]
    assert not any(is_held_out(turn.combination) for turn in turns)


def structured(message: Message) -> dict[str, object]:
    """The message with its calls in fields, as programs give it to a template."""
    calls = calls_of(message["content"])
    functions = [{"type": "function", "function": call} for call in calls]
    return {**message, "content": "", "tool_calls": functions} if calls else {**message}


def test_the_template_renders_tools_calls_and_results_as_training_did(
    conversations: list[Conversation],
) -> None:
    pytest.importorskip("torch")
    from models.folder import TEMPLATE  # noqa: PLC0415 - needs torch

    plain = jinja2.Environment(autoescape=False)  # noqa: S701 - a prompt is no web page
    plain.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = plain.from_string(TEMPLATE)
    for conversation in conversations:
        messages, tools = conversation.messages(), [json.loads(one) for one in conversation.tools]
        wanted = render(messages, conversation.tools)
        assert template.render(messages=messages, tools=tools) == wanted
        assert template.render(messages=[*map(structured, messages)], tools=tools) == wanted
        assert template.render(messages=messages[:1], tools=None) == render(messages[:1])


def test_markers_are_plain_tokens_in_the_places_of_unused_bytes() -> None:
    tokenizer = read_tokenizer(HOME)
    assert tokenizer.get_vocab_size() == 1024
    for marker in MARKERS:
        (number,) = tokenizer.encode(marker).ids
        assert tokenizer.decode([number], skip_special_tokens=True) == marker
    text = "Grüße, 世界! 🙂 õö÷øùú"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


LAMP = {"action": "turn_on", "device": "desk lamp"}
CALL = as_call("read", {"sensor": "hall", "n": 2})


def _said(text: str) -> dict[str, object]:
    return {"tool": "say", "arguments": {"text": text}}


@pytest.mark.parametrize(
    ("answer", "expect", "right"),
    [
        (json.dumps(LAMP), LAMP, True),
        (json.dumps([LAMP]), LAMP, True),
        (json.dumps([LAMP, {"action": "x"}]), [{"action": "x"}, LAMP], True),
        (json.dumps([LAMP, LAMP]), LAMP, False),
        ('{"action":"turn_on"}', LAMP, False),
        (CALL, {"tool": "read", "arguments": {"n": 2, "sensor": "hall"}}, True),
        (CALL, {"tool": "read"}, False),
        (CALL, "refuse", False),
        ("<tool_call>\n{\n</tool_call>", {"tool": "read"}, False),
        ("I cannot find the lamp here.", "refuse", True),
        ("The lamp is on.", "refuse", False),
        (json.dumps(LAMP), "refuse", False),
        ("Which one: a or b?", "ask", True),
        ("Which one: a or b?", "refuse", False),
        ("Your name is Ada.", "ada", True),
        ("It is 21 degrees.", ["21", "degrees"], True),
        ("It is 21.", ["21", "degrees"], False),
        ("It is 21.5 degrees.", "21", False),
        ("There are Two.", "2", True),
        ("There are 20 lights.", "two", False),
        ("The door is unlocked.", "locked", False),
        ("In the blue box.", "The Blue Box!", True),
        (json.dumps({**LAMP, "device": "The desk lamp"}), LAMP, True),
        (json.dumps({**LAMP, "device": "lamp"}), LAMP, False),
        (as_call("say", {"text": "Dinner is ready."}), _said("dinner is ready"), True),
        (as_call("say", {"text": 2}), _said("2"), False),
    ],
)
def test_an_answer_is_right_by_what_was_expected(
    answer: str, expect: object, *, right: bool
) -> None:
    assert is_right(answer, expect) is right


def test_a_file_has_devices_and_tools_in_either_form(tmp_path: Path) -> None:
    device = {"name": "lamp", "kind": "light", "room": "hall", "state": "on"}
    lines = [
        {"devices": ["- a (tv, hall): off", device], "user": "hi", "expect": "refuse"},
        {"tools": [{"name": "f"}], "user": "hi", "expect": "ask", "before": [{"role": "user"}]},
    ]
    path = tmp_path / "sentences.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", "utf-8")
    first, second = read_sentences(path)
    assert first.messages[0]["content"].splitlines()[1:] == [
        "Devices:",
        "- a (tv, hall): off",
        "- lamp (light, hall): on",
    ]
    assert second.tools == ('{"type": "function", "function": {"name": "f"}}',)
    assert [message["role"] for message in second.messages] == ["user", "user"]


@pytest.mark.parametrize("line", ["{", "[]", '{"user": "x"}', '{"user": "x", "expect": 1, "b": 2}'])
def test_what_is_no_sentence_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "sentences.jsonl"
    path.write_text(f"\n{line}\n", "utf-8")
    with pytest.raises(ValueError, match="line 2"):
        read_sentences(path)
