"""The vectors and the specification are true: through both encoder and decoder."""

import re
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from hearth.daemon.door.faults import describe
from hearth_client.protocol import ClientMessage, ServerMessage
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
        return "`[]`"
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
