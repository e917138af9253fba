"""Vectors and the specification, through encoder and decoder; errors and options keep to them."""

import re
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

import hearth_client
from hearth.daemon.door.faults import describe
from hearth.runtime.errors import CODES
from hearth_client.errors import (
    _BY_CODE,
    HearthClientError,
    InvalidValue,
    RequestRefused,
    ServerError,
    UnsupportedOption,
    error_for,
)
from hearth_client.options import (
    ChatOptions,
    GenerateOptions,
    as_messages,
    generate_request,
    tokenize_request,
)
from hearth_client.protocol import ClientMessage, Error, Generate, Message, ServerMessage
from tests.clients.vectors import CLIENTS, load

PROTOCOL_TEXT = (CLIENTS / "PROTOCOL.md").read_text(encoding="utf-8")
SIDES = {"requests": ClientMessage, "answers": ServerMessage}
GOOD = [(side, vector) for side in SIDES for vector in load(side)]


def plain(message: object) -> object:
    return msgspec.json.decode(msgspec.json.encode(message))


def structs(union: Any) -> dict[str, inspect.StructType]:
    kinds = [inspect.type_info(kind) for kind in get_args(union)]
    return {str(kind.tag): kind for kind in kinds if isinstance(kind, inspect.StructType)}


@pytest.mark.parametrize(
    ("side", "vector"), GOOD, ids=lambda value: value["name"] if isinstance(value, dict) else value
)
def test_bytes_mean_what_is_written(side: str, vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    assert plain(msgspec.msgpack.decode(data)) == vector["message"]
    message = msgspec.msgpack.decode(data, type=SIDES[side])
    means = vector.get("means", vector["message"])
    assert plain(message) == means
    assert plain(msgspec.msgpack.decode(msgspec.msgpack.encode(message))) == means


@pytest.mark.parametrize("side", SIDES)
def test_every_message_type_has_a_vector(side: str) -> None:
    assert {vector["message"]["t"] for vector in load(side)} == set(structs(SIDES[side]))


def test_the_conversation_is_the_one_in_the_specification() -> None:
    text = PROTOCOL_TEXT.replace("\n", "")
    for line in load("conversation"):
        union = ClientMessage if line["from"] == "client" else ServerMessage
        data = bytes.fromhex(line["hex"])
        assert plain(msgspec.msgpack.decode(data, type=union)) == line["message"]
        assert line["hex"] in text


def table(name: str) -> dict[str, list[str]]:
    """Rows of the specification's table for a message, by field."""
    section = re.search(rf"^### {name}$(.*?)(?=^##)", PROTOCOL_TEXT, re.MULTILINE | re.DOTALL)
    assert section, f"{name} is not in PROTOCOL.md"
    rows = re.findall(r"^\| `(\w+)`( \?)? \| (.*) \|$", section.group(1), re.MULTILINE)
    return {field: [*cells.split(" | "), mark] for field, mark, cells in rows}


def default_text(field: inspect.Field) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()}`"
    if field.default is None:
        return "nil"
    return f"`{msgspec.json.encode(field.default).decode()}`"


@pytest.mark.parametrize("name", structs(ClientMessage))
def test_the_specification_has_every_request_field_with_range_and_default(name: str) -> None:
    rows = table(name)
    fields = structs(ClientMessage)[name].fields
    assert list(rows) == [field.name for field in fields]
    for field in fields:
        value, default = rows[field.name][:2]
        assert (value, default) == (describe(field.type), default_text(field)), field.name


@pytest.mark.parametrize("name", structs(ServerMessage))
def test_the_specification_has_every_answer_field(name: str) -> None:
    rows = table(name)
    fields = structs(ServerMessage)[name].fields
    assert set(rows) == {field.name for field in fields}
    for field in fields:
        assert (rows[field.name][-1] == " ?") == (not field.required), field.name


def documented_codes() -> set[str]:
    text = (CLIENTS / "PROTOCOL.md").read_text(encoding="utf-8")
    table = text.split("## Error codes")[1].split("## Versions")[0]
    return set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))


def test_a_code_becomes_its_exception() -> None:
    error = error_for(Error(code="invalid_value", message="top_p is wrong", field="top_p"))
    assert isinstance(error, InvalidValue)
    assert isinstance(error, RequestRefused)
    assert (error.code, error.field) == ("invalid_value", "top_p")
    assert str(error) == "top_p is wrong (invalid_value, top_p)"
    assert error.retry_after_s is None


def test_a_failure_says_when_to_come_again() -> None:
    error = error_for(Error(code="queue_full", message="256 wait already", retry_after_s=1.2345))
    assert error.retry_after_s == 1.2345
    assert str(error) == "256 wait already (queue_full, again in 1.23 s)"


def test_an_unknown_code_is_kept_in_a_server_error() -> None:
    error = error_for(Error(code="brand_new", message="something"))
    assert type(error) is ServerError
    assert str(error) == "something (brand_new)"


@pytest.mark.parametrize("code", sorted(documented_codes()))
def test_every_documented_code_has_its_exception(code: str) -> None:
    assert code in CODES
    assert code in _BY_CODE or code == ServerError.code, "add a class to hearth_client.errors"


def test_every_exception_is_documented_and_exported() -> None:
    assert set(_BY_CODE) <= documented_codes()
    for kind in _BY_CODE.values():
        assert issubclass(kind, HearthClientError)
        assert vars(hearth_client)[kind.__name__] is kind


def test_options_become_fields() -> None:
    request = generate_request("1", "x", None, {"max_tokens": 3, "stop": ["a"]})
    assert request == Generate(id="1", prompt="x", max_tokens=3, stop=["a"])


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedOption) as caught:
        generate_request("1", "x", None, {"best_of": 2})
    assert caught.value.field == "best_of"
    with pytest.raises(UnsupportedOption, match="of tokenize"):
        tokenize_request("1", "x", None, {"top_k": 2})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("deadline", "deadline_s"), ("max_new_tokens", "max_tokens"), ("timeout", "deadline_s")],
)
def test_the_nearest_option_is_named(name: str, nearest: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"nearest: {nearest}"):
        generate_request("1", "x", None, {name: 2})


def test_one_stop_text_is_a_list_of_it() -> None:
    assert generate_request("1", "x", None, {"stop": "\n"}).stop == ["\n"]


@pytest.mark.parametrize(("prompt", "messages"), [(None, None), ("x", [])])
def test_prompt_and_messages_exclude_each_other(
    prompt: str | None, messages: list[Message] | None
) -> None:
    with pytest.raises(InvalidValue, match="exactly one of them"):
        generate_request("1", prompt, messages, {})


def test_each_option_is_explained() -> None:
    text = f"{GenerateOptions.__doc__} {ChatOptions.__doc__}"
    assert [name for name in GenerateOptions.__annotations__ if name not in text] == []


def test_every_field_of_generate_is_an_option() -> None:
    assert {"id", "prompt", "messages", *GenerateOptions.__annotations__} == set(
        Generate.__struct_fields__
    )


def test_messages_may_be_structs_or_mappings() -> None:
    turn = Message(role="user", content="hi")
    assert as_messages([turn, {"role": "user", "content": "hi"}]) == ([turn, turn], [])
    with pytest.raises(InvalidValue) as caught:
        as_messages([turn, {"role": "user"}])
    assert caught.value.field == "messages[1]"
    with pytest.raises(UnsupportedOption) as other:
        as_messages([{"role": "user", "content": "hi", "colour": "red"}])
    assert other.value.field == "messages[0]"
