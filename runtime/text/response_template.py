"""The `response_template` of tokenizer_config.json, as `transformers` 5 documents it.

Fields of a message have marks that open and close them, a parser of their content and a transform
into the message's shape. Read are those that say what a `ReplyFormat` can: marks that are text, or
patterns of text, white space and named groups.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from hearth.runtime.text.reply_format import CallForm, ReplyFormat

_REASONING = ("thinking", "reasoning_content", "reasoning")
_GROUP = re.compile(r"\(\?P<(\w+)>(?:[^()\\]|\\.)*\)")
_SPACE = re.compile(r"\\s[*+]|\\n|\s+")
_ESCAPED = re.compile(r"\\(\W)")


def read_response_template(template: Any) -> ReplyFormat | None:
    """The format that a response template describes; None where it says more than one can."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or template.get("version", 1) != 1:
        return None
    try:
        reasoning = next((_around(fields[name]) for name in _REASONING if name in fields), ("", ""))
        calls = _calls(fields["tool_calls"]) if "tool_calls" in fields else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return ReplyFormat("response_template", "response_template", reasoning, calls)


def _calls(field: Mapping[str, Any]) -> CallForm:
    content, options = field.get("content", "text"), field.get("content_args", {})
    transform = field.get("transform", {})
    function = transform.get("function", transform)
    opened, closed = _pieces(field, "open"), _pieces(field, "close")
    section = (opened[0], closed[0])
    several = bool(field.get("transform_each"))
    if content == "python-call-list":
        return CallForm("python", section=(section[0] + "[", "]" + section[1]), separator=", ")
    if content == "json" and len(opened) == 1:
        name = _content_key(function["name"])
        arguments = _content_key(function["arguments"])
        if options.get("unquoted_keys") or options.get("string_delims"):
            raise ValueError(name)
        form = CallForm("json", call=section, name_key=name, arguments_key=arguments)
        if several:
            listed = (section[0] + "[", "]" + section[1])
            form = structs.replace(form, section=listed, call=("", ""), separator=", ")
        return form
    # The name is a group of the opening mark, and the arguments are the content.
    before, group, after = opened
    if function["name"] != f"{{{group}}}" or function["arguments"] != "{content}":
        raise ValueError(group)
    if content == "json" and options.get("unquoted_keys"):
        quotes = options.get("string_delims") or [['"', '"']]
        if after.rstrip() not in {"", "{"}:
            raise ValueError(after)
        return CallForm("bare", call=(before, closed[0].lstrip("}")), quote=quotes[0][0])
    if content == "json":
        return CallForm("named", call=(before, closed[0]), name_close=after)
    key_open, key, key_close, value, value_close = _split(options["tag_pattern"])
    if content != "xml-inline" or (key, value) != ("key", "value"):
        raise ValueError(content)
    return CallForm(
        "tagged",
        call=(before, closed[0]),
        name_close=after,
        key_open=key_open,
        key_close=key_close,
        value_close=value_close,
    )


def _content_key(placeholder: str) -> str:
    found = re.fullmatch(r"\{(?:content\.)?(\w+)\}", placeholder)
    if found is None:
        raise ValueError(placeholder)
    return found[1]


def _around(field: Mapping[str, Any]) -> tuple[str, str]:
    opened, closed = _pieces(field, "open"), _pieces(field, "close")
    if len(opened) + len(closed) > 2:  # noqa: PLR2004 # a group in one of the two
        raise ValueError(opened)
    return opened[0], closed[0]


def _pieces(field: Mapping[str, Any], which: str) -> list[str]:
    """A mark as text, the names of groups between."""
    if f"{which}_pattern" in field:
        return _split(field[f"{which}_pattern"])
    mark = field.get(which, "")
    return [mark if isinstance(mark, str) else mark[0]]


def _split(pattern: str) -> list[str]:
    """The texts of a pattern and the names of the groups between; raises where it has more."""
    found: list[str] = []
    at = 0
    for group in _GROUP.finditer(pattern):
        found += [_plain(pattern[at : group.start()]), group[1]]
        at = group.end()
    return [*found, _plain(pattern[at:])]


def _plain(pattern: str) -> str:
    text = _ESCAPED.sub("", _SPACE.sub("", pattern))
    if re.search(r"[\\()\[\]{}?*+.^$|]", text):
        raise ValueError(pattern)
    return _ESCAPED.sub(r"\1", _SPACE.sub("\n", pattern))
