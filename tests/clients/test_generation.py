"""Replies, as their deltas make them: text, reasoning, calls, and several of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hearth_client import (
    AsyncClient,
    Client,
    ExecutorFailed,
    InvalidValue,
    Reply,
    ReplyEmpty,
    ToolCall,
)
from hearth_client.protocol import CallPiece, Delta, Message
from tests.daemon.door.harness import Harness, running_door

CALL = ToolCall(id="c1", name="f", arguments={"a": 1})
TURN = Message(role="assistant", content="ok", reasoning="hm", tool_calls=[CALL])


@pytest.fixture
def door() -> Iterator[Harness]:
    with running_door() as harness:
        yield harness


def test_reasoning_and_calls_are_apart_from_the_text(door: Harness) -> None:
    with Client(door.path) as client:
        generation = client.generate("calls")
        assert generation.message() == TURN
        assert (generation.text(), generation.reasoning) == ("ok", "hm")
        assert generation.tool_calls == [CALL]
        assert generation.result().reason == "tool_calls"
        assert generation.result().stop == "END"
        turns = [Message(role="user", content="calls"), generation.message()]
        assert client.tokenize(messages=turns, template={"x": 1}) == [*map(ord, "callsok")]


async def test_the_same_of_the_async_client(door: Harness) -> None:
    async with AsyncClient(door.path) as client:
        generation = await client.generate("calls")
        assert await generation.message() == TURN
        assert generation.tool_calls == [CALL]
        assert await client.tokenize(messages=[{"role": "user", "content": "a"}]) == [97]


def test_who_names_no_feature_reads_as_before(door: Harness) -> None:
    with Client(door.path, features=()) as client:
        client.generate("calls").text()
    assert door.actors.prepared[0].features == []


def test_a_failure_has_what_the_reply_took(door: Harness) -> None:
    with Client(door.path) as client, pytest.raises(ExecutorFailed) as caught:
        client.generate("fail").text()
    assert caught.value.usage is not None
    assert caught.value.usage.completion_tokens == 1


def reply(*pieces: CallPiece, text: str = "") -> Reply:
    made = Reply()
    for piece in pieces:
        made.add(Delta(id="a", seq=0, text=text, tool_calls=[piece]))
    return made


def test_calls_are_whole_or_not_there() -> None:
    made = reply(
        CallPiece(index=0, id="a", name="f", arguments="{"),
        CallPiece(index=0, arguments="}"),
        CallPiece(index=1, id="b", name="g", arguments='{"x": '),
    )
    assert made.tool_calls == [ToolCall(id="a", name="f")]
    assert made.message() == Message(role="assistant", tool_calls=made.tool_calls)


CUT = CallPiece(index=0, id="b", name="g", arguments='{"x": ')


@pytest.mark.parametrize(
    ("made", "why"),
    [(reply(CUT), "its call of g"), (Reply(), "no text")],
)
def test_a_reply_with_nothing_whole_is_no_turn(made: Reply, why: str) -> None:
    with pytest.raises(ReplyEmpty, match=why):
        made.message()


def test_a_call_that_was_cut_is_no_part_of_the_turn() -> None:
    assert reply(CUT, text="one moment").message() == Message(
        role="assistant", content="one moment"
    )


def test_reasoning_alone_is_no_turn() -> None:
    made = Reply()
    made.add(Delta(id="a", seq=0, text="", reasoning="hm"))
    with pytest.raises(ReplyEmpty, match="reasoning alone"):
        made.message()


def test_what_cannot_be_encoded_is_refused_by_name(door: Harness) -> None:
    nested: list[object] = []
    nested.append(nested)
    with Client(door.path) as client, pytest.raises(InvalidValue) as caught:
        client.generate(messages=[TURN], tools=[{"name": "f", "parameters": {"a": nested}}])
    assert caught.value.field == "tools"
