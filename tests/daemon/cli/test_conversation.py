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
