import importlib.util
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from hearth.runtime.errors import HearthError
from hearth.runtime.grammar import checks
from hearth.runtime.grammar.checks import (
    MOST_BYTES,
    MOST_DEPTH,
    MOST_ENUM_ENTRIES,
    MOST_PROPERTIES,
    MOST_TOOLS,
    Schema,
    check_schemas,
    json_term,
    lark_grammar,
    regex_grammar,
    regex_term,
    try_grammar,
)

BYTES = LLTokenizer("byte")
OBJECT: Schema = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "x/y": {"type": "array", "items": True}},
    "required": ["a"],
}
A = {"type": "object", "properties": {"a": {"const": 1}}}
B = {"properties": {"b": {"const": 1}}}


def accepts(term: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, "start: " + term, log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        OBJECT,
        {"$defs": {"a": {"type": ["null", "string"]}}, "$ref": "#/$defs/a"},
        {"$defs": {"enum": {"const": 2**53}}, "$ref": "#/$defs/enum"},
        {"allOf": [{"type": "number", "multipleOf": 0.25}, {"multipleOf": 1000}]},
        {"type": "object", "properties": {"x-guidance": {"type": "string"}}},
        {"enum": [{"x-guidance": 1}, "é", 3], "default": {"x-guidance": {}}},
        {"type": "string", "format": "date-time"},
        {"type": "string", "pattern": "^[a-z]{2,5}$"},
        {"type": "string", "pattern": r"^[^\x00-\x1f]+\\\\x01[^\x7f]\n$"},
        {"enum": ["a\n\t\f", {"\x01": 1}]},
    ],
)
def test_a_schema_that_can_be_enforced_passes(schema: Schema) -> None:
    check_schemas({"schema": schema})


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {}}, "`not`"),
        ({"if": {}, "then": {}}, "`if`"),
        ({"type": "array", "uniqueItems": True}, "`uniqueItems`"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "`dependentRequired`"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "`propertyNames`"),
        (A | {"minProperties": 2}, "`minProperties`"),
        ({"type": "object", "unevaluatedProperties": False}, "`unevaluatedProperties`"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "`oneOf`"),
        ({"oneOf": [A | {"required": ["a"]}, B | {"type": "object"}]}, "`oneOf`"),
        ({"const": {"a": ["b\x01"]}}, "const"),
        ({"const": -(2**63) + 1}, "const"),
        ({"type": "integer", "multipleOf": 1001}, "`multipleOf`"),
        ({"allOf": [{"type": "integer", "multipleOf": 97}, {"multipleOf": 1.01}]}, "`multipleOf`"),
        ({"type": "number", "multipleOf": float("nan")}, "JSON"),
        ({"type": "number", "multipleOf": True}, "`multipleOf`"),
        ({"type": "number", "multipleOf": 10**400}, "multipleOf"),
        ({"enum": [{"a": [1e300]}]}, "enum"),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum"),
        ({"$ref": "#/default", "default": {"enum": ["\x01"]}}, "`$ref`"),
        ({"$ref": "#/%65num/0", "enum": [{"type": "string"}]}, "`$ref`"),
        ({"enum": ["a\x7f"]}, "enum"),
        ({"type": "string", "pattern": "^a\\x01b$"}, "pattern"),
        ({"type": "string", "pattern": "a[\\u{7f}]b"}, "pattern"),
        ({"type": "object", "patternProperties": {"^\\v": {}}}, "patternProperties"),
        ({"type": "string", "format": "path"}, "`format` path"),
        ({"type": "string", "pattern": "(?=too large)b"}, "look-around"),
        ({"type": "string", "pattern": "("}, "`pattern`"),
        ({"$ref": "#/x"}, "`$ref` to /x"),
        ({"$ref": "http://other/schema"}, "`$ref`"),
        ({"type": "strin"}, "`type` strin"),
        ({"properties": 3}, "`properties`"),
        ({"type": "string", "minLength": "3"}, "`minLength`"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "contradict"),
        ({"type": "object", "required": ["z"], "additionalProperties": False}, "`required`"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "x-guidance"),
        ({"items": [{"x-guidance": {}}]}, "x-guidance"),
        ({"$ref": "#"}, "no reply"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no reply"),
        (False, "contradict"),
        ({"const": float("nan")}, "JSON"),
        ({"const": b"x"}, "JSON"),
        ({"const": "\ud800"}, "JSON"),
        (deep(MOST_DEPTH), "levels deep"),
        (deep(100_000), "levels deep"),
        ({"enum": list(range(MOST_ENUM_ENTRIES + 1))}, "`enum`"),
        ({"properties": {f"p{i}": {} for i in range(MOST_PROPERTIES + 1)}}, "`properties`"),
        ({"const": "x" * MOST_BYTES}, "bytes"),
    ],
)
def test_a_schema_that_cannot_is_refused_with_its_keyword(schema: Schema, named: str) -> None:
    with pytest.raises(HearthError) as caught:
        check_schemas({"response_format.schema": schema})
    assert (caught.value.code, caught.value.field) == ("grammar_invalid", "response_format.schema")
    assert named in caught.value.message
    assert "\n" not in caught.value.message


def test_schemas_are_bounded_together_and_the_one_at_fault_is_named() -> None:
    half = {"enum": [f"v{i}" for i in range(MOST_ENUM_ENTRIES // 2 + 1)]}
    with pytest.raises(HearthError, match="tools\\[1\\]: more than") as caught:
        check_schemas({"tools[0]": half, "tools[1]": half})
    assert caught.value.field == "tools[1]"
    with pytest.raises(HearthError, match="at most") as caught:
        check_schemas({f"tools[{i}]": {} for i in range(MOST_TOOLS + 1)})
    assert caught.value.field == f"tools[{MOST_TOOLS}]"
    check_schemas({})


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a":1}', True),
        ('{"a": 1, "x/y": [1, {}]}', True),
        ('{"a":  1}', False),
        ('{\n"a":1}', False),
        ('{"a":1,"\\u0061":"x"}', False),
        ('{"a":1,"x\\/y":"x"}', False),
        ('{"a":"1"}', False),
        ('{"a":1,"b":"\\n\\"é"}', False),
    ],
)
def test_a_term_enforces_its_schema_with_one_blank_at_most(text: str, *, taken: bool) -> None:
    assert accepts(json_term(OBJECT), text) == taken


@pytest.mark.parametrize(
    ("schema", "text", "taken"),
    [
        (A, '{"b":1}', False),
        (A, '{"a":1}', True),
        ({"type": "array", "items": A}, '[{"b":1}]', False),
        ({"anyOf": [A, {"type": "integer"}]}, '{"b":1}', False),
        ({"$ref": "#/$defs/b", "$defs": {"b": A}}, '{"b":1}', False),
        (A | {"additionalProperties": True}, '{"b":1}', True),
        (A | {"additionalProperties": {"type": "string"}}, '{"b":""}', True),
        (A | {"required": ["b"]}, '{"b":1}', True),
        (A | {"required": ["a"], "minProperties": 2}, '{"a":1,"b":1}', True),
        ({"type": "object"}, '{"b":1}', True),
        ({"allOf": [A, B]}, '{"a":1,"b":1}', True),
        (A | {"anyOf": [B]}, '{"a":1,"b":1}', True),
        (B | {"$ref": "#/$defs/a", "$defs": {"a": A}}, '{"b":1,"a":1}', True),
        ({"enum": [{"properties": {"a": 1}, "b": 1}]}, '{"properties":{"a":1},"b":1}', True),
    ],
)
def test_objects_have_what_they_list_where_they_say_nothing_of_others(
    schema: Schema, text: str, *, taken: bool
) -> None:
    check_schemas({"schema": schema})
    assert accepts(json_term(schema), text) == taken


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a/b", "a/b"),
        (r"a\/b", "a/b"),
        ("a\nb", "a\nb"),
        ("a\\\nb", "a\nb"),
        (r"\\/", r"\/"),
        (r"\d{2}", "42"),
        ("é+", "éé"),
    ],
)
def test_a_regex_is_a_term(pattern: str, text: str) -> None:
    try_grammar(regex_grammar(pattern, "regex"))
    assert accepts(regex_term(pattern), text)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("", "no reply"),
        ("[", "has an error"),
        ("(?=a)b", "look-around"),
        ("a\\", "has an error"),
        ("\ud800", "surrogates"),
        ("x" * (MOST_BYTES + 1), "bytes"),
        ("/" * MOST_BYTES, "bytes"),
    ],
)
def test_a_regex_that_cannot_be_enforced_is_refused(pattern: str, named: str) -> None:
    with pytest.raises(HearthError, match=named) as caught:
        try_grammar(regex_grammar(pattern, "regex"))
    assert (caught.value.code, caught.value.field) == ("grammar_invalid", "regex")


@pytest.mark.parametrize(
    "text",
    [
        'start: "yes" | "no"',
        'start: <think> BODY </think> "a"\nBODY: /[a-z]+/',
        "start: <[151668]> %json {}",
        '// %json {"x\nstart: "%json" "{"',
        'start: /a+/ "a"',
    ],
)
def test_a_lark_grammar_passes_also_with_tokens_of_the_model(text: str) -> None:
    try_grammar(lark_grammar(text, "lark"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "cannot"),
        ("start: ", "no reply"),
        ("start: a\na: a", "no reply"),
        ("start: <think> b", "line and column"),
        ("start: (", "line and column"),
        ('start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}', "x-guidance"),
        ('start: %json {"x-guid\\u0061nce": {"lenient": true}}', "x-guidance"),
        ("start: %json " + json.dumps({"enum": list(range(MOST_ENUM_ENTRIES + 1))}), "`enum`"),
        ("start: %json " + '{"items":' * 500 + "{}" + "}" * 500, "levels deep"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "llguidance"),
        ('{"grammars": [{"json_schema": {"x-guidance": {"lenient": true}}}]}', "rule `start`"),
    ],
)
def test_a_lark_grammar_that_cannot_be_enforced_is_refused(text: str, named: str) -> None:
    with pytest.raises(HearthError, match=named) as caught:
        try_grammar(lark_grammar(text, "lark"))
    assert (caught.value.code, caught.value.field) == ("grammar_invalid", "lark")


def test_without_the_extra_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda _name: None)
    assert importlib.util.find_spec("llguidance") is not None
    checked: list[Callable[[], object]] = [
        partial(check_schemas, {"schema": {}}),
        partial(regex_grammar, "a", "regex"),
        partial(lark_grammar, "start: TEXT", "lark"),
    ]
    for check in checked:
        with pytest.raises(HearthError, match="pip install 'llguidance") as caught:
            check()
        assert caught.value.code == "unsupported_option"


def test_properties_at_will_fit_the_limits() -> None:
    names = [f"property {number}" for number in range(MOST_PROPERTIES)]
    check_schemas({"schema": {"type": "object", "properties": {name: {} for name in names}}})
