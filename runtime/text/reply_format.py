"""The marks of reasoning and calls in a model's replies, as data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import structs

from hearth.runtime.errors import HearthError


class CallForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """Spelling of calls: marks around them, and how name and arguments lie between.

    `section` encloses all calls of a turn that lie side by side, `call` each of them; either may be
    empty. `kind` is "json" (one JSON object with `name_key` and `arguments_key`; with an empty
    `name_key` the name is the key of the arguments), "named" (a name, then its arguments as JSON),
    "tagged" (a name, then each argument between marks), "python" (`f(a=1)`) or "bare"
    (`f{a:1}`, keys without quotes).

    A head is `call[0]`, the id and `id_close` with `id_place` "before", the name and `name_close`,
    and up to `head_close`, if any, the id with `id_place` "after", or what is of no use. An
    argument is `key_open`, its name, `key_close`, up to `value_open`, if any, its type, the value
    and `value_close`. `quote` encloses text in the dialect of "bare".

    A reply of "channels" is messages: a head, `head_close` and a body up to one of `section` or
    `call[1]`. It is a call where the head has `call[0]` and a name, reasoning where it has
    `key_open`, else text.
    """

    kind: Literal["json", "named", "tagged", "python", "bare", "channels"]
    section: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("", "")
    separator: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    id_place: Literal["", "before", "after"] = ""
    id_close: str = ""
    name_close: str = ""
    head_close: str = ""
    key_open: str = ""
    key_close: str = ""
    value_open: str = ""
    value_close: str = ""
    quote: str = ""


class ReplyFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """Marks of a model's replies: around its reasoning, and around its calls.

    Empty marks, and None for `calls`, say that the model has none. `source` tells how it was found:
    "setting", "response_template", "known", "probe", or "own" where Hearth describes its own form
    to the model.
    """

    name: str
    source: Literal["setting", "response_template", "known", "probe", "own"]
    reasoning: tuple[str, str] = ("", "")
    calls: CallForm | None = None


def marks_of(shape: ReplyFormat) -> list[str]:
    """All that stands in a reply beside what the model says: its special tokens are looked for."""
    form = shape.calls
    if form is None:
        return [*shape.reasoning]
    found = [*shape.reasoning, *form.section, *form.call, form.section[0] + form.call[0]]
    found += [form.separator, form.id_close, form.name_close, form.head_close, form.key_open]
    return [*found, form.key_close, form.value_open, form.value_close, form.quote]


# ruff: noqa: RUF001 # marks of models are spelled as the models spell them
_THINK = ("<think>", "</think>")
_JSON = CallForm("json", call=("<tool_call>\n", "\n</tool_call>"), separator="\n")
_FUNCTIONS = CallForm(
    "tagged",
    call=("<tool_call>\n<function=", "\n</function>\n</tool_call>"),
    separator="\n",
    name_close=">",
    key_open="\n<parameter=",
    key_close=">\n",
    value_close="\n</parameter>",
)
_GLM = CallForm(
    "tagged",
    call=("<tool_call>", "\n</tool_call>"),
    separator="\n",
    key_open="\n<arg_key>",
    key_close="</arg_key>\n<arg_value>",
    value_close="</arg_value>",
)
_DEEPSEEK = CallForm(
    "named",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    name_close="<｜tool▁sep｜>",
)
_KIMI = CallForm(
    "named",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call=("<|tool_call_begin|>functions.", "<|tool_call_end|>"),
    name_close=":",
    head_close="<|tool_call_argument_begin|>",
)
_LFM = CallForm("python", section=("<|tool_call_start|>[", "]<|tool_call_end|>"), separator=", ")
_GEMMA = CallForm("bare", call=("<|tool_call>call:", "<tool_call|>"), quote='<|"|>')
_CHANNELS = CallForm(
    "channels",
    section=("<|start|>", "<|end|>"),
    call=("to=functions.", "<|call|>"),
    head_close="<|message|>",
    key_open="<|channel|>analysis",
)
_GRANITE = CallForm("json", section=("<|tool_call|>[", "]"), separator=", ")
_NEMO = CallForm("json", section=("[TOOL_CALLS][", "]"), separator=", ", id_key="id")
KNOWN_FORMATS = {
    one.name: one
    for one in (
        ReplyFormat("deepseek-v3.1", "setting", _THINK, _DEEPSEEK),
        ReplyFormat("gemma-4", "setting", ("<|channel>thought\n", "<channel|>"), _GEMMA),
        ReplyFormat("glm-4", "setting", _THINK, _GLM),
        ReplyFormat("gpt-oss", "setting", ("", ""), _CHANNELS),
        ReplyFormat("granite-3", "setting", _THINK, _GRANITE),
        ReplyFormat("hermes", "setting", _THINK, _JSON),
        ReplyFormat("kimi-k2", "setting", _THINK, _KIMI),
        ReplyFormat("lfm2", "setting", _THINK, _LFM),
        ReplyFormat("llama-3", "setting", calls=CallForm("json", arguments_key="parameters")),
        ReplyFormat(
            "mistral",
            "setting",
            ("[THINK]", "[/THINK]"),
            CallForm("named", call=("[TOOL_CALLS]", ""), name_close="[ARGS]"),
        ),
        ReplyFormat("mistral-nemo", "setting", calls=_NEMO),
        ReplyFormat("qwen3-coder", "setting", _THINK, _FUNCTIONS),
        ReplyFormat("none", "setting"),
    )
}
"""Formats by the names that a setting may give."""
_TRAITS = {
    "<|channel|>analysis": "gpt-oss",
    "<|tool_list_start|>": "lfm2",
    "List of tools: [": "lfm2",
    "<|tool_calls_section_begin|>": "kimi-k2",
    "respond only with <|tool_call|>": "granite-3",
}
OWN_CALLS = _JSON
"""Hearth's own form, for models of which no other is known."""


def format_by_name(name: str) -> ReplyFormat:
    """A known format; raises `invalid_value` for another name."""
    if name not in KNOWN_FORMATS:
        known = ", ".join(sorted(KNOWN_FORMATS))
        raise HearthError("invalid_value", f"a reply format is one of {known}", "reply_format")
    return KNOWN_FORMATS[name]


def format_by_trait(source: str) -> ReplyFormat | None:
    """The known format of a template that writes no calls, or not as its model does."""
    found = (KNOWN_FORMATS[name] for trait, name in _TRAITS.items() if trait in source)
    shape = next(found, None)
    return None if shape is None else structs.replace(shape, source="known")


def spelled_calls(
    form: CallForm, calls: Sequence[tuple[str, Mapping[str, Any]]], dump: Callable[[Any], str]
) -> str:
    """Calls, of name and arguments, in a form; `dump` gives the JSON text of a value."""
    each = [_spelled(form, name, given, dump) for name, given in calls]
    if form.kind == "channels":
        return "<|start|>assistant".join(each)
    return form.section[0] + form.separator.join(each) + form.section[1]


def _spelled(
    form: CallForm, name: str, given: Mapping[str, Any], dump: Callable[[Any], str]
) -> str:
    opened, closed = form.call
    if form.kind == "json":
        body = {form.name_key: name, form.arguments_key: given} if form.name_key else {name: given}
        return opened + dump(body) + closed
    if form.kind == "channels":
        return f" {opened}{name}<|channel|>commentary json{form.head_close}{dump(given)}{closed}"
    if form.kind == "python":
        inside = ", ".join(f"{key}={_literal(value, dump)}" for key, value in given.items())
        return f"{opened}{name}({inside}){closed}"
    if form.kind == "bare":
        return f"{opened}{name}{_bare(given, form.quote, dump)}{closed}"
    head = opened + ("0" + form.id_close if form.id_place == "before" else "") + name
    head += form.name_close + ("0" + form.head_close if form.head_close else "")
    if form.kind == "named":
        return head + dump(given) + closed
    kinds = {True: ' string="true"', False: ' string="false"'}
    for key, value in given.items():
        text = value if isinstance(value, str) else dump(value)
        kind = kinds[isinstance(value, str)] + form.value_open if form.value_open else ""
        head += form.key_open + key + form.key_close + kind + text + form.value_close
    return head + closed


def _literal(value: Any, dump: Callable[[Any], str]) -> str:
    if value is None or isinstance(value, bool):
        return str(value)
    return dump(value)


def _bare(value: Any, quote: str, dump: Callable[[Any], str]) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_bare(v, quote, dump)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_bare(one, quote, dump) for one in value) + "]"
    return dump(value)
