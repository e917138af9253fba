"""Schemas of our own, of the kinds that clients send, and a check of values against them."""

import json
import re
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

ROOMS = ("kitchen", "garage", "hall", "bedroom", "living room", "office", "attic", "cellar")
_DEVICES = [f"{room} {thing}" for room in ROOMS for thing in ("lamp", "fan", "blind")]
_LEVEL = {"type": "integer", "minimum": 0, "maximum": 100}
_SHORT = {"type": "string", "maxLength": 20}
_COUNT = {"type": "integer", "minimum": 1, "maximum": 999}


def _object(**properties: Any) -> Schema:
    """Closed object whose properties are required, but for those whose name ends with `_`."""
    return {
        "type": "object",
        "properties": {name.removesuffix("_"): one for name, one in properties.items()},
        "required": [name for name in properties if not name.endswith("_")],
        "additionalProperties": False,
    }


def _list(items: Any, most: int = 4, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _call(name: str, arguments: Schema) -> Schema:
    return _object(name={"const": name}, arguments=arguments)


def _tools() -> dict[str, Schema]:
    arguments = {
        "turn_on": _object(device={"enum": _DEVICES}),
        "turn_off": _object(device={"enum": _DEVICES}, after_s_={"type": "integer", "minimum": 0}),
        "set_level": _object(device={"enum": _DEVICES}, level=_LEVEL),
        "set_scene": _object(room={"enum": list(ROOMS)}, scene=_SHORT, fade_=_LEVEL),
        "read_sensor": _object(sensor={"enum": ["temperature", "humidity", "co2"]}),
        "get_state": _object(devices=_list({"enum": _DEVICES}, 5, 1)),
        "add_timer": _object(minutes=_COUNT, label_=_SHORT),
        "move_to": _object(x={"type": "number"}, y={"type": "number"}, frame_=_SHORT),
        "pick": _object(object=_SHORT, gripper={"enum": ["left", "right"]}),
        "search": _object(query=_SHORT, limit_={"type": "integer", "minimum": 1, "maximum": 50}),
        "send_mail": _object(to=_list(_SHORT, 3, 1), subject=_SHORT, body={"type": "string"}),
        "play": _object(title_=_SHORT, artist_=_SHORT, volume_=_LEVEL),
        "lock": _object(door={"enum": ["front", "back"]}, locked={"type": "boolean"}),
        "set_colour": _object(device={"enum": _DEVICES}, rgb=_list(_LEVEL, 3, 3)),
        "plan": _object(steps=_list(_object(action=_SHORT, room={"enum": list(ROOMS)}), 4, 1)),
    }
    calls = {name: _call(name, one) for name, one in arguments.items()}
    return calls | {
        f"any of {count}": {"anyOf": list(calls.values())[:count]} for count in (3, 8, 15)
    }


def _nested() -> dict[str, Schema]:
    inner: Schema = _object(value={"type": "integer"})
    found = {}
    for depth in range(2, 9, 2):
        for _ in range(2):
            inner = _object(inner=inner, note_=_SHORT)
        found[f"depth {depth}"] = inner
    home = _object(
        name=_SHORT,
        rooms=_list(_object(name={"enum": list(ROOMS)}, devices=_list({"enum": _DEVICES}, 3)), 3),
    )
    wide = _object(**{f"field_{number}": {"type": ["integer", "null"]} for number in range(40)})
    loose = {
        "type": "object",
        "properties": {f"p{number}": {"type": "boolean"} for number in range(12)},
        "additionalProperties": False,
    }
    return found | {"home": home, "wide": wide, "loose": loose}


def _enums() -> dict[str, Schema]:
    words = [f"{one} {two}" for one in ROOMS for two in _DEVICES]
    return {
        "rooms": {"enum": list(ROOMS)},
        "devices": _list({"enum": _DEVICES}, 6, 1),
        "many words": {"enum": words},
        "mixed": {"enum": [None, True, 3, "three", [3], {"three": 3}]},
        "numbers": _object(code={"enum": list(range(100, 600, 7))}),
        "constants": _object(kind={"const": "state"}, version={"const": 2}, of={"enum": _DEVICES}),
    }


def _strings() -> dict[str, Schema]:
    return {
        "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "name": _object(name={"type": "string", "pattern": "^[a-z][a-z0-9_]{0,15}$"}),
        "colour": {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
        "path": {"type": "string", "pattern": "^(/[a-z]{1,8}){1,4}$"},
        "bounded": _list({"type": "string", "minLength": 2, "maxLength": 12}, 3),
        "date": _object(day={"type": "string", "format": "date"}),
        "moment": _object(at={"type": "string", "format": "date-time"}),
        "identity": {"type": "string", "format": "uuid"},
        "address": _object(host={"type": "string", "format": "ipv4"}, port=_COUNT),
    }


def _numbers() -> dict[str, Schema]:
    return {
        "integer": {"type": "integer"},
        "range": _object(low=_LEVEL, high={"type": "integer", "exclusiveMinimum": 100}),
        "number": _list({"type": "number", "minimum": -1, "maximum": 1}, 4, 1),
        "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
        "pair": {"type": "array", "prefixItems": [_LEVEL, {"type": "boolean"}], "minItems": 2}
        | {"items": False},
    }


def _recursive() -> dict[str, Schema]:
    node = _object(value=_LEVEL, left_={"$ref": "#/$defs/node"}, right_={"$ref": "#/$defs/node"})
    tree = {
        "$defs": {"tree": _object(name=_SHORT, children_=_list({"$ref": "#/$defs/tree"}, 2))},
        "$ref": "#/$defs/tree",
    }
    term = {"$ref": "#/$defs/e"}
    expression = {
        "$defs": {
            "e": {
                "anyOf": [
                    {"type": "integer"},
                    _object(op={"enum": ["+", "-"]}, a=term, b=term),
                ]
            }
        },
        "$ref": "#/$defs/e",
    }
    rest = {"$ref": "#/$defs/l"}
    linked = {
        "$defs": {"l": {"anyOf": [{"type": "null"}, _object(head=_LEVEL, tail=rest)]}},
        "$ref": "#/$defs/l",
    }
    return {
        "binary tree": {"$defs": {"node": node}, "$ref": "#/$defs/node"},
        "tree": tree,
        "expression": expression,
        "linked list": linked,
    }


def _unions() -> dict[str, Schema]:
    known = _object(kind={"const": "known"}, device={"enum": _DEVICES})
    other = _object(kind={"const": "other"}, reason=_SHORT)
    return {
        "union": {"anyOf": [known, other]},
        "optional": _object(value={"anyOf": [{"type": "null"}, _LEVEL]}),
        "map": {"type": "object", "additionalProperties": _LEVEL},
        "all": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 30}]},
    }


def schemas() -> dict[str, Schema]:
    """Return all of them, by kind and name."""
    kinds = {
        "tool": _tools(),
        "nested": _nested(),
        "enum": _enums(),
        "string": _strings(),
        "number": _numbers(),
        "recursive": _recursive(),
        "union": _unions(),
    }
    return {f"{kind}: {name}": one for kind, found in kinds.items() for name, one in found.items()}


_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "number": (int, float),
}


def is_valid(text: str, schema: Schema) -> bool:
    """Tell whether a text is JSON of a value that a schema of these keywords allows."""
    try:
        return _allows(schema, json.loads(text), schema)
    except ValueError:
        return False


def _allows(schema: Any, value: Any, root: Schema) -> bool:
    """Tell whether a schema allows a value; `root` has the definitions that it refers to."""
    if isinstance(schema, bool):
        return schema
    return all(
        _RULES[keyword](argument, value, schema, root)
        for keyword, argument in schema.items()
        if isinstance(value, _APPLIES.get(keyword, object))
    )


def _is(value: Any, kind: str) -> bool:
    if kind == "integer":
        return _is(value, "number") and value == int(value)
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _types(kinds: Any, value: Any, *_: Any) -> bool:
    return any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _same(one: Any, other: Any, *_: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _properties(known: Any, value: Any, _schema: Any, root: Schema) -> bool:
    return all(_allows(known[name], one, root) for name, one in value.items() if name in known)


def _others(kind: Any, value: Any, schema: Any, root: Schema) -> bool:
    rest = [one for name, one in value.items() if name not in schema.get("properties", {})]
    return all(_allows(kind, one, root) for one in rest)


def _first(kinds: Any, value: Any, _schema: Any, root: Schema) -> bool:
    return all(_allows(kind, one, root) for kind, one in zip(kinds, value, strict=False))


def _items(kind: Any, value: Any, schema: Any, root: Schema) -> bool:
    rest = value[len(schema.get("prefixItems", [])) :]
    return all(_allows(kind, one, root) for one in rest)


# RFC 3339, but that February always has 29 days.
_DAY = (
    r"\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
    r"|02-(0[1-9]|[12]\d))"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1?\d?\d)"
_FORMATS = {
    "date": _DAY,
    "date-time": f"{_DAY}[tT ]{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
}


_APPLIES: dict[str, type] = {
    **dict.fromkeys(("properties", "required", "additionalProperties"), dict),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), list),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), str),
}
_RULES: dict[str, Callable[[Any, Any, Any, Schema], bool]] = {
    "$defs": lambda *_: True,
    "$ref": lambda to, value, _, root: _allows(root["$defs"][to.split("/")[-1]], value, root),
    "type": _types,
    "enum": lambda known, value, *_: any(_same(one, value) for one in known),
    "const": _same,
    "anyOf": lambda kinds, value, _, root: any(_allows(kind, value, root) for kind in kinds),
    "allOf": lambda kinds, value, _, root: all(_allows(kind, value, root) for kind in kinds),
    "properties": _properties,
    "required": lambda names, value, *_: all(name in value for name in names),
    "additionalProperties": _others,
    "items": _items,
    "prefixItems": _first,
    "minItems": lambda least, value, *_: len(value) >= least,
    "maxItems": lambda most, value, *_: len(value) <= most,
    "minLength": lambda least, value, *_: len(value) >= least,
    "maxLength": lambda most, value, *_: len(value) <= most,
    "pattern": lambda pattern, value, *_: re.search(pattern, value) is not None,
    "format": lambda name, value, *_: re.fullmatch(_FORMATS[name], value) is not None,
    "minimum": lambda least, value, *_: value >= least,
    "maximum": lambda most, value, *_: value <= most,
    "exclusiveMinimum": lambda least, value, *_: value > least,
    "multipleOf": lambda unit, value, *_: value % unit == 0,
}
