"""Vectors and the specification, through encoder and decoder; errors and options keep to them."""

import re
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

import hearth_client
from hearth.daemon.door.faults import describe
from hearth.daemon.door.requests import FEATURES
from hearth.daemon.door.wire import MessageError, decode
from hearth.runtime.errors import CODES
from hearth_client.connection import Connection
from hearth_client.errors import (
    _BY_CODE,
    ConnectionFailed,
    HearthClientError,
    InvalidValue,
    ProtocolViolation,
    RequestRefused,
    ServerError,
    ServiceFailed,
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


def used(kind: inspect.Type, value: object) -> set[str]:
    """Fields and words of a type that a value has, as `Struct.field` and by themselves."""
    match kind, value:
        case inspect.UnionType(), _:
            return set[str]().union(*(used(one, value) for one in kind.types))
        case inspect.StructType(), dict() if kind.tag in {None, value.get(kind.tag_field or "")}:
            given = [field for field in kind.fields if field.name in value]
            found = (used(field.type, value[field.name]) for field in given)
            return {f"{kind.cls.__name__}.{one.name}" for one in given}.union(*found)
        case inspect.ListType(), list():
            return set[str]().union(*(used(kind.item_type, one) for one in value))
        case inspect.LiteralType(), str():
            return {value} & {*map(str, kind.values)}
    return set()


def offered(kind: inspect.Type) -> dict[str, str]:
    """Fields and words of a type, likewise, each with its name on the wire."""
    match kind:
        case inspect.UnionType():
            return {name: wire for one in kind.types for name, wire in offered(one).items()}
        case inspect.StructType():
            found = {f"{kind.cls.__name__}.{field.name}": field.name for field in kind.fields}
            for field in kind.fields:
                found |= offered(field.type)
            return found
        case inspect.ListType():
            return offered(kind.item_type)
        case inspect.LiteralType():
            return {str(value): str(value) for value in kind.values}
    return {}


@pytest.mark.parametrize("side", SIDES)
def test_every_field_and_word_has_a_vector_and_its_place_in_the_specification(side: str) -> None:
    kind = inspect.type_info(SIDES[side])
    names = offered(kind)
    assert len(names) > 50
    assert names.keys() == set[str]().union(*(used(kind, one["message"]) for one in load(side)))
    words = {*re.findall(r"[\w.]+", " ".join(re.findall(r"`[^`\n]+`", PROTOCOL_TEXT)))}
    words |= {*re.findall(r"\w+", " ".join(re.findall(r"\| one of [^|]+", PROTOCOL_TEXT)))}
    assert [name for name, wire in names.items() if wire not in words] == []


def depth(value: Any) -> int:
    """Maps and lists in one another, the outermost counted."""
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


def test_arguments_of_the_greatest_depth_are_taken_and_deeper_ones_are_not() -> None:
    deepest = max(
        (bytes.fromhex(one["hex"]) for one in load("requests")),
        key=lambda data: depth(msgspec.msgpack.decode(data)),
    )
    message = decode(deepest)
    assert isinstance(message, Generate)
    assert message.messages is not None
    call = message.messages[1].tool_calls[0]
    assert depth(msgspec.msgpack.decode(deepest)) == 69
    assert depth(call.arguments) == 64
    call.arguments = {"a": call.arguments}
    with pytest.raises(MessageError, match="64 deep"):
        decode(msgspec.msgpack.encode(message))


def test_answers_nest_no_deeper_than_the_specification_says() -> None:
    known = [one for one in load("answers") if "of a later server" not in one["name"]]
    depths = {depth(one["message"]) for one in [*known, *load("conversation")]}
    assert max(depths) == 5
    assert max(depth(one["message"]) for one in load("answers")) == 16


@pytest.mark.parametrize("vector", load("malformed_answers"), ids=lambda vector: vector["name"])
def test_malformed_answers_are_ignored_or_end_the_session(vector: dict[str, Any]) -> None:
    connection = Connection("", None, 5.0)
    exchange, _ = connection.request(lambda name: Generate(id=name, prompt="x"), 0.0)
    assert exchange.id == "1"
    assert connection.receive(bytes.fromhex(vector["hex"]), 0.0) is None
    ends = vector["client"] == "ends the session"
    assert vector["client"] in {"ends the session", "ignores"}
    assert isinstance(connection.failure, ProtocolViolation) == ends == exchange.ended
    assert not exchange.deltas


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


def test_the_specification_has_every_feature() -> None:
    listed = re.search(r"^Features of version 1: (.*?)\. Those", PROTOCOL_TEXT, re.MULTILINE)
    assert listed
    documented = re.findall(r"`(\w+)`", listed[1])
    of_models = {"images", "reasoning", "response_format", "template", "tools"}
    assert documented == sorted({*FEATURES, *of_models})


def documented_codes() -> dict[str, str]:
    """Kinds of the table of errors, by code."""
    table = PROTOCOL_TEXT.split("## Error codes")[1].split("## Versions")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.MULTILINE))


KINDS = {"request": RequestRefused, "service": ServiceFailed, "connection": ConnectionFailed}


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
    assert issubclass(_BY_CODE.get(code, ServerError), KINDS[documented_codes()[code]])


def test_every_exception_is_documented_and_exported() -> None:
    assert set(_BY_CODE) <= set(documented_codes())
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
