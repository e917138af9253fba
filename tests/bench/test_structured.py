import json
from typing import Any

import pytest
from click.testing import CliRunner

from hearth.bench.__main__ import bench
from hearth.bench.structured.command import pieces
from hearth.bench.structured.schemas import is_valid, schemas
from hearth.runtime.grammar import check_schemas

LISTS = {
    "$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}},
    "$ref": "#/$defs/l",
}
ROOM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_each_schema_can_be_enforced() -> None:
    found = schemas()
    assert len(found) >= 50
    for name, schema in found.items():
        check_schemas({name: schema})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (ROOM, '{"a": 1, "b": "x"}', '{"a": "1"}'),
        (ROOM, '{"a": 1.0}', '{"b": 1}'),
        (ROOM | {"additionalProperties": False}, '{"a": 1}', '{"a": 1, "b": 2}'),
        ({"enum": [1, "1", None]}, '"1"', "true"),
        ({"const": {"a": [1]}}, '{"a": [1]}', '{"a": [2]}'),
        ({"type": ["integer", "null"]}, "null", "false"),
        ({"type": "array", "prefixItems": [{"type": "string"}], "items": False}, '["x"]', "[1]"),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 1}, "[true]", "[true, true]"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aa"', '"aaa"'),
        ({"type": "string", "format": "date"}, '"0000-02-29"', '"2024-04-31"'),
        ({"type": "string", "format": "date-time"}, '"2024-01-31T23:59:60Z"', '"2024-01-31"'),
        ({"type": "string", "format": "ipv4"}, '"10.0.0.255"', '"10.0.0.256"'),
        ({"type": "integer", "multipleOf": 5, "maximum": 10}, "10", "11"),
        ({"type": "integer", "exclusiveMinimum": 3}, "4", "3"),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, "3", '"3"'),
        (LISTS, "[[[]]]", "[[3]]"),
    ],
)
def test_the_check_tells_valid_from_invalid(schema: dict[str, Any], good: str, bad: str) -> None:
    assert is_valid(good, schema)
    assert not is_valid(bad, schema)
    assert not is_valid(good + "x", schema)


def test_a_vocabulary_has_as_many_distinct_pieces_as_it_is_asked_for() -> None:
    found = list(pieces(150_000))
    assert len(set(found)) == 150_000
    assert {"42", '":', " ba"} <= set(found)


def test_a_toy_is_measured_and_its_replies_are_valid() -> None:
    flags = ["structured", "--draws", "16", "--turns", "1", "--vocabulary", "2000", "--json"]
    result = CliRunner().invoke(bench, flags, standalone_mode=False)
    assert result.exception is None
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["draws"], found["vocabulary"], found["valid_share"]) == (16, 2000, 1.0)
    assert 0 < found["replies"] <= 16
    assert 0 < found["mask_us_p50"] <= found["mask_us_p99"]
    assert 0 < found["compile_ms_p50"] <= found["compile_ms_p99"]
    assert found["step_cost"] > 0
