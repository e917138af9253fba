"""Forms that requests ask of their replies, on their way to a grammar."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from hearth.actors.messages import Failed, Request
from hearth.runtime.errors import HearthError
from hearth.runtime.grammar import FIELD, checks, unforced
from hearth.runtime.text.conversation import Conversation, ResponseFormat, Tool, Turn
from hearth.runtime.text.tokenizer import Tokenizer
from tests.actors.scheduler.simulation import output
from tests.actors.tokenizer.test_actor import harness, step
from tests.runtime.text.folders import byte_level, open_tokenizer

pytest.importorskip("llguidance")
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
BAD: dict[str, Any] = {"type": "array", "uniqueItems": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(tmp_path_factory.mktemp("engine"), byte_level())


def chat(*tools: Tool, **fields: Any) -> Conversation:
    return Conversation([Turn("user", "hi")], [*tools], **fields)


async def answer_to(tokenizer: Tokenizer, request: Request) -> Request | Failed:
    async with harness(tokenizer) as made:
        made.mail.post(request)
        mailbox: Any = made.door if request.rid == REFUSED else made.scheduler
        answer = await mailbox.receive()
        assert isinstance(answer, Request | Failed)
        return answer


REFUSED = 2


@pytest.mark.parametrize(
    ("prompt", "form", "grammar"),
    [
        ("x", ResponseFormat("regex", grammar="on|off"), "start: /on|off/"),
        ("x", ResponseFormat("lark", grammar='start: "on"'), unforced('start: "on"')),
        ("x", ResponseFormat("json_object"), "start: %json"),
        ("x", ResponseFormat("json_schema", schema=OBJECT), "start: %json"),
        (None, ResponseFormat("json_schema", schema=OBJECT), "%json"),
        ("x", None, ""),
    ],
)
async def test_a_form_becomes_the_grammar_of_the_reply(
    tokenizer: Tokenizer, prompt: str | None, form: ResponseFormat | None, grammar: str
) -> None:
    asked = Request(1, chat=chat() if prompt is None else None, prompt=prompt, response_format=form)
    submit = await answer_to(tokenizer, asked)
    assert isinstance(submit, Request)
    assert grammar in submit.options.grammar
    assert bool(grammar) == bool(submit.options.grammar)
    assert (submit.response_format, submit.chat, submit.features) == (None, None, [])


@pytest.mark.parametrize(
    ("conversation", "enforced"),
    [
        (chat(Tool("f", parameters=BAD)), False),
        (chat(Tool("f", parameters=OBJECT), tool_choice="none"), False),
        (chat(Tool("f", parameters=OBJECT, strict=True)), True),
        (chat(Tool("f", parameters=OBJECT), tool_choice="required"), True),
        (chat(Tool("f", parameters=OBJECT), tool_choice="=f"), True),
    ],
)
async def test_calls_are_held_where_they_are_forced_or_strict(
    tokenizer: Tokenizer, conversation: Conversation, *, enforced: bool
) -> None:
    submit = await answer_to(tokenizer, Request(1, chat=conversation))
    assert isinstance(submit, Request)
    assert bool(submit.options.grammar) == enforced


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"response_format": ResponseFormat("json_schema", schema=BAD)}, "response_format.schema"),
        ({"response_format": ResponseFormat("regex", grammar="(")}, "response_format.regex"),
        ({"response_format": ResponseFormat("lark", grammar="x")}, "response_format.grammar"),
        ({"chat": chat(Tool("f", parameters=BAD), tool_choice="=f")}, "tools[0].parameters"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_before_it_is_accepted(
    tokenizer: Tokenizer, asked: dict[str, Any], field: str
) -> None:
    failed = await answer_to(tokenizer, Request(REFUSED, **{"chat": chat(), **asked}))
    assert isinstance(failed, Failed)
    assert (failed.code, failed.field) == ("grammar_invalid", field)


async def test_a_schema_that_ends_its_compiler_is_refused_and_the_actor_goes_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_MOST_NUMBER", 1 << 63)
    deadly, fine = ({"const": number} for number in (1 - 2**63, 5))
    async with harness(tokenizer) as made:
        made.mail.post(with_schema(REFUSED, deadly))
        failed = await made.door.receive()
        made.mail.post(with_schema(1, fine))
        submit = await made.scheduler.receive()
    assert isinstance(failed, Failed)
    assert (failed.code, failed.field) == ("grammar_invalid", "response_format.schema")
    assert isinstance(submit, Request)
    assert "%json" in submit.options.grammar


def with_schema(rid: int, schema: dict[str, Any]) -> Request:
    return Request(rid, prompt="x", response_format=ResponseFormat("json_schema", schema=schema))


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"response_format": ResponseFormat("json_object")}, "response_format"),
        (
            {"response_format": ResponseFormat("json_schema", schema=OBJECT)},
            "response_format.schema",
        ),
        ({"response_format": ResponseFormat("regex", grammar="a")}, "response_format.regex"),
        (
            {
                "chat": chat(Tool("f", parameters=OBJECT, strict=True)),
                "response_format": ResponseFormat("lark", grammar='start: "a"'),
            },
            "response_format.grammar",
        ),
        ({"chat": chat(Tool("g"), Tool("f"), tool_choice="=f")}, "tools[1].parameters"),
    ],
)
async def test_what_fails_later_is_told_by_the_clients_own_field(
    tokenizer: Tokenizer, asked: dict[str, Any], field: str
) -> None:
    failures = [Failed([1], "grammar_invalid", "the executor's words", FIELD)]
    async with harness(tokenizer) as made:
        for rid in (1, 3):
            made.mail.post(Request(rid, **{"chat": chat(), **asked}))
            await made.scheduler.receive()
        made.mail.post(output(failed=failures))
        failed = await made.door.receive()
        assert failed == structs.replace(failures[0], field=field)
        made.mail.post(step([(3, 0)], error="grammar_invalid"))
        failed = await made.door.receive()
    assert isinstance(failed, Failed)
    assert (failed.rids, failed.code, failed.field) == ([3], "grammar_invalid", field)


async def test_without_the_extra_each_form_is_refused_by_its_field(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(field: str) -> None:
        raise HearthError("unsupported_option", "it is not installed", field)

    monkeypatch.setattr("hearth.actors.tokenizer.actor.require", missing)
    failed = await answer_to(tokenizer, Request(REFUSED, chat=chat(reasoning_budget=5)))
    assert isinstance(failed, Failed)
    assert (failed.code, failed.field) == ("unsupported_option", "reasoning_budget")
