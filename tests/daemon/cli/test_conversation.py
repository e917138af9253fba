from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.daemon.cli.conversation import HELP, Conversation
from hearth_client import ToolCall
from hearth_client.protocol import Limits


def contents(conversation: Conversation) -> list[str]:
    return [turn["content"] for turn in conversation.messages("next")]


def test_turns_follow_the_system_message() -> None:
    conversation = Conversation("be brief")
    conversation.add("hi", "hello")
    assert conversation.messages("bye") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
    ]


def test_messages_alone_remember_nothing() -> None:
    conversation = Conversation()
    conversation.messages("one")
    assert contents(conversation) == ["next"]


def test_a_reply_that_was_cancelled_before_its_first_text_is_forgotten() -> None:
    conversation = Conversation()
    conversation.add("hello", "")
    assert contents(conversation) == ["next"]
    conversation.add("hello", "h")
    assert contents(conversation) == ["hello", "h", "next"]


def test_reset_keeps_the_system_message() -> None:
    conversation = Conversation("s")
    conversation.add("a", "b")
    assert conversation.command("/reset")[0] == "show"
    assert contents(conversation) == ["s", "next"]


def test_system_starts_again_with_another_message() -> None:
    conversation = Conversation("s")
    conversation.add("a", "b")
    conversation.command("/system  be a pirate ")
    assert contents(conversation) == ["be a pirate", "next"]
    conversation.command("/system -")
    assert contents(conversation) == ["next"]


def test_system_alone_shows_the_message_and_leaves_it() -> None:
    conversation = Conversation("be brief")
    conversation.add("a", "b")
    assert conversation.command("/system") == ("show", "be brief")
    assert contents(conversation) == ["be brief", "a", "b", "next"]
    assert Conversation().command("/system") == ("show", "there is no system message")


@pytest.mark.parametrize(
    ("line", "action"),
    [
        ("/exit", ("leave", "")),
        ("/quit", ("leave", "")),
        ("/help", ("show", HELP)),
        ("turn on the lamp", ("say", "turn on the lamp")),
        ("a / b", ("say", "a / b")),
    ],
)
def test_lines(line: str, action: tuple[str, str]) -> None:
    assert Conversation().command(line) == action


def test_an_unknown_command_is_not_sent_to_the_model() -> None:
    action, text = Conversation().command("/rest")
    assert action == "show"
    assert "/help" in text


def test_pictures_go_with_the_next_message_and_stay_in_the_conversation(tmp_path: Path) -> None:
    path = tmp_path / "a picture.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    conversation = Conversation()
    assert conversation.command(f"/image {path}") == ("show", "pictures for the next message: 1")
    for _ in range(2):
        image, text = conversation.messages("see")[0]["content"]
        assert (image.frame, text) == (path.read_bytes(), "see")
    conversation.add("see", "yes")
    first, _, third = conversation.messages("bye")
    assert (first["content"], third["content"]) == ([image, "see"], "bye")
    conversation.command(f"/image {path}")
    assert conversation.command("/image -") == ("show", "pictures for the next message: 0")
    assert conversation.messages("bye")[-1]["content"] == "bye"


def test_a_picture_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    assert conversation_refuses(f"/image {path}").endswith(
        "cannot be read: No such file or directory"
    )
    path.write_text("no picture")
    assert conversation_refuses(f"/image {path}").startswith(f"{path}: this is no JPEG")


def conversation_refuses(line: str) -> str:
    conversation = Conversation()
    action, text = conversation.command(line)
    assert action == "refuse"
    assert conversation.messages("x")[-1]["content"] == "x"
    return text


LIMITS = Limits(
    frame_bytes=1 << 20,
    frames=3,
    requests_per_client=8,
    prompt_tokens=2000,
    total_tokens=2048,
    queued_requests=8,
    queued_tokens=8000,
    lease_s=30,
    images=2,
    request_image_bytes=20,
)


def test_a_picture_is_refused_at_once_where_the_model_takes_none(tmp_path: Path) -> None:
    limits = structs.replace(LIMITS, images=0)
    conversation = Conversation(limits=limits)
    action, text = conversation.command(f"/image {tmp_path}")
    assert (action, conversation.images) == ("refuse", 0)
    assert "hearth export home-vision" in text


@pytest.mark.parametrize("given", ["'{}'", '"{}"', "{}", "escaped"])
def test_quotes_that_a_terminal_puts_around_a_file_are_no_part_of_its_name(
    tmp_path: Path, given: str
) -> None:
    path = tmp_path / "a b.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    shown = given.format(path) if "{}" in given else str(path).replace(" ", "\\ ")
    assert Conversation(limits=LIMITS).command(f"/image {shown}")[0] == "show"


def test_the_shipped_picture_is_known_by_name() -> None:
    assert Conversation(limits=LIMITS).command("/image scene.jpg")[0] == "show"


@pytest.mark.parametrize(
    ("asked", "tokens", "crowded"),
    [
        (127, 100, False),
        (128, 100, True),  # with the next one and the system message 258 turns
        (2, 1920, False),
        (2, 1921, True),
        (1, 2048, False),  # of what would be left
    ],
)
def test_room_is_made_before_limits_are_met(asked: int, tokens: int, *, crowded: bool) -> None:
    conversation = Conversation("s", LIMITS)
    for number in range(asked):
        conversation.add(f"q{number}", "a", tokens)
    assert conversation.crowded() == crowded


def test_pictures_of_old_turns_make_room_for_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    conversation = Conversation(limits=LIMITS)
    for _ in range(2):
        conversation.command(f"/image {path}")
        conversation.add("see", "yes", 10)
    assert not conversation.crowded()
    conversation.command(f"/image {path}")
    assert conversation.crowded()
    assert conversation.shorten() == 1
    assert not conversation.crowded()


def test_a_quarter_leaves_at_a_time() -> None:
    conversation = Conversation()
    for number in range(12):
        conversation.add(f"q{number}", "a")
    assert [conversation.shorten() for _ in range(9)] == [3, 2, 1, 1, 1, 1, 1, 1, 1]
    assert conversation.shorten() == 0


CALLS = [ToolCall(id="1", name="f", arguments={"a": 1}), ToolCall(id="2", name="g")]


def test_results_of_calls_come_before_anything_else_is_said() -> None:
    conversation = Conversation()
    conversation.add("do it", "", 9, "hm", CALLS)
    assert conversation.command("/stats")[0] == "show"
    for result in ('{"ok": true}', ""):
        assert conversation.command(result) == ("answer", result)
        conversation.answer(result)
    assert conversation.command("and now") == ("say", "and now")
    asked, called, *results = conversation.messages(None)
    assert (asked["content"], called["tool_calls"]) == ("do it", CALLS)
    assert called["reasoning"] == "hm"
    assert [(one["tool_call_id"], one["content"]) for one in results] == [
        ("1", '{"ok": true}'),
        ("2", ""),
    ]
    conversation.add(None, "done")
    roles = [turn["role"] for turn in conversation.messages("next")]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]


def test_a_question_without_its_reply_is_not_dropped_for_room_and_can_be_forgotten() -> None:
    conversation = Conversation()
    conversation.add("one", "a")
    conversation.add("two", "", calls=CALLS[:1])
    conversation.answer("x")
    assert [conversation.shorten(), conversation.shorten()] == [1, 0]
    conversation.forget_last()
    assert contents(conversation) == ["next"]


def test_reset_forgets_calls_too() -> None:
    conversation = Conversation()
    conversation.add("one", "", calls=CALLS)
    conversation.command("/reset")
    assert conversation.command("hi") == ("say", "hi")


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0.5", "temperature", 0.5),
        ("/set top_k 40", "top_k", 40),
        ("/set speculation false", "speculation", False),
        ("/set stop a b", "stop", ["a b"]),
        ("/set reasoning_budget 9", "reasoning_budget", 9),
        ("/set template.enable_thinking false", "template", {"enable_thinking": False}),
        ("/set template.style plain", "template", {"style": "plain"}),
    ],
)
def test_options_are_set_shown_and_taken_back(line: str, name: str, value: Any) -> None:
    conversation = Conversation()
    _, asked, _ = line.split(" ", 2)
    shown = json.dumps(next(iter(value.values())) if isinstance(value, dict) else value)
    assert conversation.command(line) == ("show", f"{asked} {shown}")
    assert conversation.options[name] == value
    assert conversation.command("/set") == ("show", f"{asked} {shown}")
    assert conversation.command(f"/set {asked}") == ("show", f"{asked} {shown}")
    conversation.command(f"/set {asked} -")
    assert not conversation.options.get(name)
    assert "none is set" in conversation.command("/set")[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set warmth 2", "there is no option warmth"),
        ("/set temperature hot", "temperature must be a number from 0.0 to 100.0"),
        ("/set top_p 0", "top_p must be a number above 0.0 to 1.0"),
        ("/set stop", "stop null"),
    ],
)
def test_what_cannot_be_set_is_named(line: str, said: str) -> None:
    conversation = Conversation()
    assert conversation.command(line)[1].startswith(said)
    assert conversation.options == {}


def test_the_last_reasoning_is_shown_on_demand() -> None:
    conversation = Conversation()
    assert "no reasoning" in conversation.command("/reasoning")[1]
    conversation.add("one", "a", reasoning="because")
    assert conversation.command("/reasoning") == ("show", "because")
