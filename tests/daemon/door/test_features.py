"""Parts of answers that come for clients with a feature, and for no others."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from hearth.daemon.door.sessions import Outbox
from hearth.daemon.door.state import reply_facts
from hearth.runtime.text.reply_format import ReplyFormat
from hearth_client.protocol import CallPiece, Delta
from tests.daemon.door.harness import greet, hear, raw_client, running_door, say
from tests.daemon.door.test_sessions import asked

ALL = ["reasoning", "tool_calls", "end_details", "token_bytes", "generation_defaults"]


def heard(features: list[str] | None, prompt: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The features that the tokenizer was told of, and all answers to a prompt."""
    hello = {} if features is None else {"features": features}
    with running_door() as door, raw_client(door.path) as client:
        assert greet(client, **hello)["t"] == "welcome"
        say(client, {"t": "generate", "id": "a", "prompt": prompt})
        answers = [hear(client)]
        while answers[-1]["t"] not in {"done", "error"}:
            answers.append(hear(client))
        return door.actors.prepared[0].features, answers


def test_the_tokenizer_hears_what_a_client_reads_of_replies() -> None:
    assert heard([*ALL, "of-tomorrow"], "calls")[0] == ["reasoning", "token_bytes", "tool_calls"]
    assert heard(None, "calls")[0] == []


def test_reasoning_and_calls_come_in_pieces() -> None:
    _, answers = heard(ALL, "calls")
    deltas = [one for one in answers if one["t"] == "delta"]
    assert [one.get("reasoning") for one in deltas] == ["hm", None, None]
    assert [one.get("tool_calls") for one in deltas] == [
        None,
        [{"index": 0, "id": "c1", "name": "f", "arguments": '{"a"'}],
        [{"index": 0, "arguments": ": 1}"}],
    ]
    assert (answers[-1]["reason"], answers[-1]["stop"]) == ("tool_calls", "END")
    usage = answers[-1]["usage"]
    assert (usage["reasoning_tokens"], usage["completion_tokens"]) == (1, 4)


@pytest.mark.parametrize("prompt", ["calls", "fail"])
def test_the_end_has_no_details_for_clients_that_did_not_ask(prompt: str) -> None:
    _, answers = heard([], prompt)
    assert not {"stop", "usage"} & set(answers[-1]) - ({"usage"} if prompt == "calls" else set())


def test_a_failure_has_the_usage_so_far() -> None:
    _, answers = heard(["end_details"], "fail")
    assert answers[-1]["t"] == "error"
    assert answers[-1]["usage"]["completion_tokens"] == 1


def test_a_later_hello_gives_other_features() -> None:
    with running_door() as door, raw_client(door.path) as client:
        greet(client, features=["reasoning"])
        greet(client)
        say(client, {"t": "generate", "id": "a", "prompt": "calls"})
        while hear(client)["t"] != "done":
            pass
        assert door.actors.prepared[0].features == []


def piece(**fields: Any) -> Delta:
    return Delta(id="a", seq=0, text="", **fields)


def test_deltas_that_wait_grow_by_reasoning_and_calls_each_in_its_reply() -> None:
    outbox, (request,) = Outbox(), asked("a")
    for choice in (0, 1):
        outbox.add(piece(choice=choice, reasoning="h"), 0.0, request)
    call = CallPiece(index=0, arguments="{}")
    assert outbox.merge(request, piece(reasoning="m", tool_calls=[call]))
    assert outbox.merge(request, piece(choice=1, tool_calls=[call]))
    assert not outbox.merge(request, piece(choice=2))
    first = outbox.head()
    assert first == piece(reasoning="hm", tool_calls=[call])
    outbox.sent(1.0)
    assert outbox.head() == piece(choice=1, reasoning="h", tool_calls=[call])
    outbox.withdraw(request)
    assert (len(outbox), outbox.bytes) == (0, 0)


@pytest.mark.parametrize(
    ("form", "tool_format"),
    [
        (ReplyFormat("hermes", "known"), "hermes"),
        (ReplyFormat("json", "own"), "hearth"),
        (ReplyFormat("none", "setting"), None),
        (None, None),
    ],
)
def test_welcome_says_how_calls_are_read(form: ReplyFormat | None, tool_format: str | None) -> None:
    with running_door() as door, raw_client(door.path) as client:
        facts = door.door._state.facts
        door.on_loop(lambda: door.door.tell(facts=structs.replace(facts, **reply_facts(form))))
        welcome = greet(client)
        assert welcome.get("tool_format") == tool_format
        assert ("tools" in welcome["features"]) == (tool_format is not None)
