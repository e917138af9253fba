from pathlib import Path

import pytest

from daemon.cli.conversation import HELP, Conversation


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
