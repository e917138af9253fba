import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from decimal import Decimal
from functools import cache
from importlib.util import find_spec
from math import isfinite, lcm
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from hearth.runtime.errors import HearthError
from hearth.runtime.packages import pip_install

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Of all schemas of a request together, so that compiling takes less than half a second.
MOST_TOOLS = 128
"""Schemas that one request may have."""
MOST_BYTES = 256 << 10
"""UTF-8 bytes of the schemas of a request as JSON, and of a regex or Lark grammar."""
MOST_DEPTH = 100
"""Maps and lists in one another."""
MOST_PROPERTIES = 512
"""Entries of `properties` and `patternProperties`."""
MOST_ENUM_ENTRIES = 4096
"""Entries of `enum`, `anyOf`, `oneOf` and `allOf`."""

Schema = dict[str, Any] | bool
"""JSON schema, as decoded."""

_OPTIONS = "x-guidance"
# Escapes that a name may have in two forms would let a second spelling of a property pass as
# another one: those of letters and of the slash are not allowed.
_PINNED = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": " ",
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": '"\\bfnrt',
    "json_allow_general_unicode_escapes": False,
}
_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_PARTS = frozenset({"properties", "anyOf", "oneOf", "$ref"})
# Beside `properties`: words that speak of other ones, or that a closed object might contradict.
_OTHERS = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties"}
    | {"minProperties", "enum", "const"}
)
_DATA = frozenset({"enum", "const", "default", "examples", "example"})
_ALTERNATIVES = frozenset({"enum", "anyOf", "oneOf", "allOf"})
_NUMBERS = frozenset(
    {"enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
)
# llguidance takes bounds for doubles, and overflows the stack of the process at -(2**63 - 1).
_MOST_NUMBER = 1 << 53
# Numbers of a multiple are found by as many states as its digits say, those of two by the product.
_MOST_MULTIPLE = 1000


def available() -> bool:
    """Tell whether the extra `grammar` is installed."""
    return find_spec("llguidance") is not None


def require(field: str) -> None:
    """Raise `unsupported_option` for `field` where the extra `grammar` is not installed."""
    if not available():
        what = f"grammars need llguidance: {pip_install('grammar')}"
        raise HearthError("unsupported_option", what, field)


def json_term(schema: Schema) -> str:
    """Lark term of a JSON schema with the options that enforce all of it; `{}` is any value.

    Objects are closed by `closed`. The schema is no deeper than `check_schemas` allows.
    """
    return _pinned_term(schema if isinstance(schema, bool) else closed(schema))


def _pinned_term(schema: Schema) -> str:
    pinned = schema if isinstance(schema, bool) else {**schema, _OPTIONS: _PINNED}
    return f"%json {json.dumps(pinned, ensure_ascii=False, separators=(',', ':'))}"


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with objects of what `properties` lists alone, where they say nothing of others.

    A schema that puts objects together from parts is left as it is: one with `allOf`, or with two
    of `properties`, `anyOf`, `oneOf` and `$ref` at one place.
    """
    made = deepcopy(schema)
    places = [*_places(made)]
    if any("allOf" in place or len(_PARTS & place.keys()) > 1 for place in places):
        return schema
    for place in places:
        if _is_open(place):
            place["additionalProperties"] = False
    return made


def _places(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all in it."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            yield value
            for key, inner in value.items():
                if key in _NAMES and isinstance(inner, dict):
                    left += inner.values()
                elif key not in _DATA:
                    left.append(inner)


def _is_open(schema: dict[str, Any]) -> bool:
    listed, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(listed, dict)
        and bool(listed)
        and not _OTHERS & schema.keys()
        and isinstance(required, list)
        and all(isinstance(name, str) and name in listed for name in required)
    )


# What would end a regex in Lark, and pairs that stay as they are.
_REGEX_PARTS = re.compile(r"\\.|[\n/]", re.DOTALL)
_LARK_SPELT = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}


def regex_term(pattern: str) -> str:
    """Lark term of a regex in the syntax of Rust's `regex`, without look-around."""
    return f"/{_REGEX_PARTS.sub(lambda part: _LARK_SPELT.get(part[0], part[0]), pattern)}/"


_UNFORCED = '%llguidance {"no_forcing":true}\n'


def unforced(grammar: str) -> str:
    """Lark grammar of which no mask looks ahead for text that it forces, which may have no end."""
    return _UNFORCED + grammar


class ClientGrammar(NamedTuple):
    """The grammar of one field of a request, bounded but not compiled."""

    field: str
    text: str


def schema_grammars(schemas: Mapping[str, Schema]) -> list[ClientGrammar]:
    """Grammars of schemas by field, to be tried alone; refuses what together is too large.

    Raises `grammar_invalid`, and `unsupported_option` without the extra.
    """
    if not schemas:
        return []
    require(next(iter(schemas)))
    if len(schemas) > MOST_TOOLS:
        field = list(schemas)[MOST_TOOLS]
        raise _invalid(f"a request has at most {MOST_TOOLS} schemas", field)
    size = _Size()
    for field, schema in schemas.items():
        size.add(schema, field)
    found: list[ClientGrammar] = []
    for field, schema in schemas.items():
        found.append(ClientGrammar(field, "start: " + json_term(schema)))
        if not isinstance(schema, bool) and any("oneOf" in place for place in _places(schema)):
            # Alternatives of closed objects may be apart where those of the schema are not.
            found.append(ClientGrammar(field, "start: " + _pinned_term(schema)))
    return found


def regex_grammar(pattern: str, field: str) -> ClientGrammar:
    """Grammar of a regex; refuses what is too large, and a backslash that escapes nothing."""
    require(field)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise _invalid(_BAD_REGEX, field)
    _check_bytes(pattern, field)
    term = regex_term(pattern)
    _check_bytes(term, field)
    return ClientGrammar(field, "start: " + term)


def lark_grammar(text: str, field: str) -> ClientGrammar:
    """Grammar of a Lark text; refuses what is too large, and a directive.

    Its `%json` terms are bounded as schemas are.
    """
    require(field)
    _check_bytes(text, field)
    if text.lstrip().startswith("{"):
        raise _invalid("a Lark grammar is text with a rule `start`", field)
    if "%llguidance" in text:
        raise _invalid("the directive %llguidance is not for clients", field)
    size = _Size()
    for schema in _json_terms(text):
        size.add(schema, field)
    return ClientGrammar(field, unforced(text))


def check_schemas(schemas: Mapping[str, Schema]) -> None:
    """Refuse schemas by field that together are too large, or of which one cannot be enforced.

    Takes up to half a second, without the lock of the interpreter. Raises `grammar_invalid` with
    the keyword at fault, and `unsupported_option` without the extra.
    """
    for grammar in schema_grammars(schemas):
        try_grammar(grammar)


# Of a parser, for one mask, and for its states, which stay in memory as long as the grammar does.
# They leave room for `MOST_PROPERTIES` that are not required, in any order.
_MOST_ITEMS, _MOST_FUEL, _MOST_STATES = 5000, 50_000, 8000


def parser_limits() -> "LLParserLimits":
    """Limits of a parser, whose errors are short."""
    from llguidance import LLParserLimits  # noqa: PLC0415 - an extra

    return LLParserLimits(
        verbose_errors=False,
        step_max_items=_MOST_ITEMS,
        step_lexer_fuel=_MOST_FUEL,
        max_lexer_states=_MOST_STATES,
    )


class _Size:
    """Counters of what the schemas of a request have together."""

    def __init__(self) -> None:
        self._bytes = self._properties = self._entries = 0

    def add(self, schema: Any, field: str) -> None:
        """Count a schema; raises `grammar_invalid` with the first bound that is exceeded."""
        if not isinstance(schema, (dict, bool)):
            raise _invalid("a schema is a map, true or false", field)
        multiple = 1
        for key, value in _keywords(schema, field):
            if key == _OPTIONS:
                raise _invalid(f"the keyword {_OPTIONS} is not for clients", field)
            _check_keyword(key, value, field)
            self._count(key, value, field)
            if key == "multipleOf":
                multiple = _multiple_of(multiple, value, field)
        try:
            self._bytes += len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
        except (TypeError, ValueError):
            raise _invalid("a schema has no values that JSON has not", field) from None
        if self._bytes > MOST_BYTES:
            raise _invalid(f"schemas have at most {MOST_BYTES} bytes", field)

    def _count(self, key: str, value: Any, field: str) -> None:
        if key in ("properties", "patternProperties") and isinstance(value, dict):
            self._properties += len(value)
        if key in _ALTERNATIVES and isinstance(value, list):
            self._entries += len(value)
        if self._properties > MOST_PROPERTIES:
            raise _invalid(f"more than {MOST_PROPERTIES} entries of `properties`", field)
        if self._entries > MOST_ENUM_ENTRIES:
            raise _invalid(f"more than {MOST_ENUM_ENTRIES} entries of `{key}`", field)


def _multiple_of(multiple: int, value: Any, field: str) -> int:
    """Least common multiple with the digits of a number, without those zeros at its end."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        return multiple
    digits = Decimal(repr(value)).normalize().as_tuple().digits
    multiple = lcm(multiple, int("".join(map(str, digits))) or 1)
    if multiple > _MOST_MULTIPLE:
        raise _invalid(f"its `multipleOf` need more than {_MOST_MULTIPLE} states", field)
    return multiple


# Control characters without a short escape, and U+007F: llguidance leaves them out of texts in
# silence, so that another text would pass. Where a set of characters has others it takes these.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CHARACTER = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[xu]\{[0-9a-fA-F]{1,8}\}|.)|.", re.DOTALL
)
_CONTROL_ESCAPE = re.compile(
    r"\\(?:[av]|[xu]\{?0*(?:0?[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])\}?)|" + _CONTROL.pattern
)


def _check_keyword(key: str, value: Any, field: str) -> None:
    if _has_unwritten(key, value):
        raise _invalid(f"the keyword {key} has a control character that no reply can spell", field)
    if key in _NUMBERS and any(abs(one) > _MOST_NUMBER for one in _atoms(value, (int, float))):
        raise _invalid(f"the keyword {key} has a number beyond 2^53, which is not exact", field)
    if key == "$ref" and isinstance(value, str) and _leads_to_data(value):
        raise _invalid("a `$ref` leads to a value, which is no schema", field)


def _leads_to_data(reference: str) -> bool:
    """True if the JSON pointer of a `$ref` goes through a keyword whose value is no schema."""
    names = False
    for part in unquote(reference.partition("#")[2]).split("/")[1:]:
        if not names and part in _DATA:
            return True
        names = not names and part in _NAMES
    return False


def _has_unwritten(key: str, value: Any) -> bool:
    """True if a keyword's texts have a character that JSON of a reply cannot have there."""
    if key in {"const", "enum"}:
        return any(_CONTROL.search(text) for text in _atoms(value, str))
    if key == "pattern":
        return isinstance(value, str) and _names_unwritten(value)
    if key == "patternProperties" and isinstance(value, dict):
        return any(_names_unwritten(pattern) for pattern in value)
    return False


def _names_unwritten(pattern: str) -> bool:
    """True if a regex has such a character outside of a set, or as all of a set."""
    count, control = -1, False
    for found in _CHARACTER.finditer(pattern):
        one = found[0]
        named = _CONTROL_ESCAPE.fullmatch(one) is not None
        if count < 0 and named:
            return True
        if count < 0:
            count = 0 if one == "[" else -1
        elif one == "]" and count:
            if control and count == 1:
                return True
            count, control = -1, False
        else:
            count, control = count + 1, control or named
    return False


def _atoms(value: Any, kind: Any) -> Iterator[Any]:
    """All texts or numbers in a value; names, which are spelt with any escape, are left out."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, kind):
            yield one
        elif isinstance(one, (dict, list)):
            left += one.values() if isinstance(one, dict) else one


def _keywords(schema: Any, field: str) -> Iterator[tuple[str, Any]]:
    """All keywords of a schema and of those in it, which may be deeper than Python can recurse."""
    # Names are keys that clients choose, data is no schema.
    names, data = object(), object()
    left: list[tuple[Any, int, object]] = [(schema, 1, None)]
    while left:
        value, depth, kind = left.pop()
        if depth > MOST_DEPTH:
            raise _invalid(f"a schema is at most {MOST_DEPTH} levels deep", field)
        if isinstance(value, list):
            left += [(one, depth + 1, kind) for one in value if isinstance(one, (dict, list))]
        if not isinstance(value, dict):
            continue
        for key, inner in value.items():
            inside: object = kind
            if kind is None:
                yield key, inner
                inside = names if key in _NAMES else data if key in _DATA else None
            elif kind is names:
                inside = None
            if isinstance(inner, (dict, list)):
                left.append((inner, depth + 1, inside))


def _json_terms(text: str) -> Iterator[Schema]:
    decoder = json.JSONDecoder()
    for found in re.finditer(r"%json\s*", text):
        try:
            schema, _ = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            # In a string or a comment; where it is a term, it is refused with the whole text.
            continue
        if isinstance(schema, dict):
            yield schema


def _check_bytes(text: str, field: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _invalid("text has no lone surrogates", field) from None
    if size > MOST_BYTES:
        raise _invalid(f"a grammar has at most {MOST_BYTES} bytes", field)


@cache
def _byte_tokenizer() -> "LLTokenizer":
    from llguidance import LLTokenizer  # noqa: PLC0415 - an extra

    return LLTokenizer("byte")


def try_grammar(grammar: ClientGrammar) -> None:
    """Compile a grammar over bytes and make its first mask: only that shows if it matches none.

    Special tokens are those of the model, which is not known here: a grammar with any is checked
    when it is compiled for the model. Raises `grammar_invalid`.
    """
    from llguidance import LLMatcher  # noqa: PLC0415 - an extra

    field, text = grammar
    matcher = LLMatcher(_byte_tokenizer(), text, log_level=0, limits=parser_limits())
    if re.search(_FOREIGN, matcher.get_error()):
        # Tokens of the model, which bytes have not: all but those can be checked.
        failed, told = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
        if failed:
            raise _invalid(reason_of(told[0]), field)
    else:
        check_start(matcher, field)


def check_start(matcher: "LLMatcher", field: str) -> None:
    """Refuse a grammar that has errors, or that begins with no token."""
    if matcher.is_error():
        raise _invalid(reason_of(matcher.get_error()), field)
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    if matcher.is_error():
        large = re.search(_LIMITS, matcher.get_error())
        raise _invalid(_TOO_LARGE if large else _NOTHING, field)
    # The end token alone: not a stop, which a grammar may come to behind a special token.
    if mask & (mask - 1) == 0 and matcher.is_accepting():
        raise _invalid(_NOTHING, field)


_FOREIGN = "unknown special token|Token range end too large"
_NOTHING = "no reply matches it, or none but an empty one"
_LIMITS = "[Tt]oo (large|big|complex|many)|[Ll]imit|fuel"
_BAD_REGEX = "a regex or `pattern` has an error"
_TOO_LARGE = "it is too large to be enforced"
_REASONS = (
    (_FOREIGN, "it names a token that the model has not"),
    (r'Unimplemented keys: \[(?P<key>"[^]]*")\]', "the keyword {key} cannot be enforced"),
    (r"Unknown format: (?P<key>\S{1,40})", "the `format` {key} cannot be enforced"),
    (r"oneOf constraints", "alternatives of `oneOf` that overlap cannot be enforced: use `anyOf`"),
    (r"Pointer '(?P<key>[^']{1,80})' does not", "the `$ref` to {key} leads nowhere"),
    (r"Resource '|Failed to resolve|InvalidUri|invalid reference", "a `$ref` leads nowhere"),
    (r"min/maxProperties only", "`minProperties` needs all `properties` to be required"),
    (r"look-around", "look-around in a regex cannot be enforced"),
    (r"regex parse error|invalid regex|backreferences", _BAD_REGEX),
    (r"required property '(?P<key>[^']{1,80})'", "the `required` property {key} cannot be there"),
    (r"Unsatisfiable schema", "its keywords contradict each other"),
    (_LIMITS, _TOO_LARGE),
    (r"Invalid type: (?P<key>\S{1,40})", "the `type` {key} is none"),
    (r"Expected [^']*'(?P<key>\w{1,40})'", "the keyword `{key}` has a value of another type"),
    (r": (?P<key>\w{1,40}) must be", "the keyword `{key}` has a value of another type"),
    (r"^(at )?(?P<key>\d+\(\d+\)):", "it has an error at line and column {key}"),
)


def reason_of(error: str) -> str:
    """Say why llguidance refuses a grammar, in words of our own, of its `error`."""
    # Indented lines are the client's own text.
    told = "\n".join(line for line in error.splitlines() if not line.startswith(" "))
    for pattern, reason in _REASONS:
        if found := re.search(pattern, told):
            return reason.format(**{key: _plain(text) for key, text in found.groupdict().items()})
    return "it cannot be enforced"


def _plain(text: str) -> str:
    return text.replace('"', "`").replace("(", ":").replace(")", "")


def _invalid(reason: str, field: str) -> HearthError:
    return HearthError("grammar_invalid", f"{field}: {reason}", field)
